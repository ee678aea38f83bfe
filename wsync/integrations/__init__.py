"""wsync inside other libraries, one module each, which imports its library: ``docs/integrations.md`` has examples."""
