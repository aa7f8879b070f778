"""What padding costs on your own data or log, what each remedy gives, and which budget to use: `padmin diagnose`.

Pure functions of arrays and dataclasses; reading, printing and timing stand at the ends. A new format of data: its name
in `reading.FORMATS`, its file in `reading._open_file`, a module beside `csv_rows` that gives a table.

    command                                     the command line
    reading                                     a source of any format becomes lengths
    lines, json_rows, csv_rows, arrow, tables   formats, and what they have in common
    fields, measure                             which columns are lengths, and how they are measured
    sampling                                    steps as a loader makes them
    remedies, packing                           what each remedy gives
    spread, report, verdict                     the report, and what it advises
    text, plot                                  the report for people
    logs, log_text                              logs of trainings
    probe                                       the cost of a launch, measured on a model
    problems, progress                          errors as one line; the bar
"""
