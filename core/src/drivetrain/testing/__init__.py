"""The conformance kit that plugin authors subclass, and what tests of distributed code need."""
