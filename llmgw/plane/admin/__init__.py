"""The plane's admin API and page: HTTPS for operators, `llmgw ctl` and browsers."""
