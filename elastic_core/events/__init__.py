"""Facts folded to what people read: ledger, sample audit, report."""
