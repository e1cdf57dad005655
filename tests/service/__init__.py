"""Tests of the whole service, which they share: its fixture ends with the last of them."""
