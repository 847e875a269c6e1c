"""Used by several commands: output, progress bars, number formats, options."""
