#!/usr/bin/env bash
# Runs every command of the report again, from the root of the repository.
set -u

magicdec sweep study.toml
magicdec sweep eagle.toml
