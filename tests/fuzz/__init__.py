"""Damaged and forged files of every kind: a named error or a correct load, in little time and memory."""
