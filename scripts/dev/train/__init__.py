"""Parts of `train_demo.py`, `demo_card.py` and `train_eagle.py`."""
