"""Hosts that decode with the replayed cache: names translated, one call; no math and no cursors here."""
