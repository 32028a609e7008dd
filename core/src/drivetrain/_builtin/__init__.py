"""What core offers itself: one device, full and mixed precision, a JSONL tracker. Registered like any plugin."""
