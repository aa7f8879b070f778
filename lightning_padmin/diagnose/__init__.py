"""What padding costs on your own data or log, what each remedy gives, and which budget to use: `padmin diagnose`.

    source -> table -> lengths   lines, json_rows, csv_rows, arrow; tables; fields, measure (columns); reading
    lengths -> report            sampling (steps as a loader makes them); remedies, packing; spread; report; verdict
    report -> output             text, plot; `Report.as_dict` for JSON
    log -> report -> text        logs, log_text
    model -> launch cost         probe, lightning_padmin.planning.cost_fit
    command                      the command line

Pure functions of arrays and dataclasses; reading, printing and timing stand at the ends.
"""
