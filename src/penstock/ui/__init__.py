"""What a person sees: progress, timers, tables, pages, and hints."""
