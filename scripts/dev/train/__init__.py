"""Parts of `train_demo.py`, `demo_card.py`, `train_eagle.py` and `train_mtp.py`."""
