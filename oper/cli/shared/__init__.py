"""Used by several commands: options, configuration file, output, progress, errors of usage."""
