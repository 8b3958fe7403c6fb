//! Results as text for people. The format of a number follows from the suffix of its name.

use serde_json::Value;
use tenmil_base::Span;

use crate::result_type::{FieldSchema, ResultType};

/// Formats a result: a list of objects as a table, an object as lines.
pub fn format_result(geometry: &ResultType, answer: &Value) -> String {
    match (geometry, answer) {
        (ResultType::Maybe(geometry), answer) if !answer.is_null() => {
            format_result(geometry, answer)
        }
        (ResultType::Rows(fields), Value::Array(rows)) => format_table(fields, rows),
        (ResultType::Record(fields), Value::Object(_)) => format_record(fields, answer),
        (ResultType::Texts, Value::Array(list)) => {
            list.iter().map(|item| format_cell("", item) + "\n").collect()
        }
        _ => format!("{answer:#}\n"),
    }
}

/// Header line and a line for each row; nested objects follow their row.
fn format_table(fields: &[FieldSchema], rows: &[Value]) -> String {
    if rows.is_empty() {
        return "none\n".into();
    }
    let (flat, nested): (Vec<&FieldSchema>, Vec<&FieldSchema>) =
        fields.iter().partition(|field| field.geometry.declared_fields().is_empty());
    let columns: Vec<TextColumn> =
        flat.into_iter().map(|field| TextColumn::from_rows(field, rows)).collect();
    let mut text = join_cells(columns.iter().map(|column| column.pad(&column.head)));
    for (index, row) in rows.iter().enumerate() {
        text += &join_cells(columns.iter().map(|column| column.pad(&column.cells[index])));
        for field in &nested {
            text += &indent(&format_result(&field.geometry, &row[field.name]));
        }
    }
    text
}

struct TextColumn {
    head: String,
    cells: Vec<String>,
    width: usize,
    is_number: bool,
}

impl TextColumn {
    fn from_rows(field: &FieldSchema, rows: &[Value]) -> Self {
        let head = column_title(field.name);
        let cells: Vec<String> =
            rows.iter().map(|row| format_cell(field.name, &row[field.name])).collect();
        let width = cells.iter().chain([&head]).map(|text| text.chars().count()).max();
        let is_number = rows.iter().all(|row| row[field.name].is_number());
        Self { head, cells, width: width.unwrap_or(0), is_number }
    }

    /// Right-aligns numbers.
    fn pad(&self, text: &str) -> String {
        let space = " ".repeat(self.width - text.chars().count());
        if self.is_number { space + text } else { text.to_owned() + &space }
    }
}

fn join_cells(cells: impl Iterator<Item = String>) -> String {
    let cells: Vec<String> = cells.collect();
    cells.join("  ").trim_end().to_owned() + "\n"
}

/// One line per member; nested objects follow the name.
fn format_record(fields: &[FieldSchema], record: &Value) -> String {
    let width =
        fields.iter().map(|field| column_title(field.name).chars().count()).max().unwrap_or(0);
    let one = |field: &FieldSchema| {
        let (name, value) = (column_title(field.name), &record[field.name]);
        let is_long = match value {
            Value::Array(list) => !field.geometry.declared_fields().is_empty() || list.len() > 1,
            Value::Object(_) => !field.geometry.declared_fields().is_empty(),
            _ => false,
        };
        if is_long && !matches!(field.geometry, ResultType::Wholes) {
            format!("{name}\n{}", indent(&format_result(&field.geometry, value)))
        } else {
            join_cells([format!("{name:<width$}"), format_cell(field.name, value)].into_iter())
        }
    };
    fields.iter().map(one).collect()
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

/// Name without its unit, which is shown with the number, and without underscores.
fn column_title(name: &str) -> String {
    let units = ["_ns", "_bytes", "_percent"];
    let bare = units.iter().find_map(|unit| name.strip_suffix(unit)).unwrap_or(name);
    bare.replace('_', " ")
}

fn format_cell(name: &str, value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::Bool(flag) => if *flag { "yes" } else { "no" }.into(),
        // Keep it on one line.
        Value::String(text) => text.chars().flat_map(escape_control_character).collect(),
        Value::Number(number) => match number.as_u64() {
            Some(ns) if name.ends_with("_ns") => format_duration(Span { ns }),
            Some(bytes) if name.ends_with("_bytes") => format_bytes(bytes),
            _ if name.ends_with("_percent") => {
                format!("{:.1} %", number.as_f64().unwrap_or_default())
            }
            _ => number.to_string(),
        },
        Value::Array(list) => {
            let items: Vec<String> = list.iter().map(|item| format_cell(name, item)).collect();
            items.join(" ")
        }
        Value::Object(_) => value.to_string(),
    }
}

/// Escapes characters that a terminal interprets.
fn escape_control_character(character: char) -> Vec<char> {
    if tenmil_base::text::is_terminal_control(character) {
        character.escape_unicode().collect()
    } else {
        vec![character]
    }
}

/// Duration with about three digits and a readable unit.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn format_duration(span: Span) -> String {
    let ns = span.ns as f64;
    match span.ns {
        0..1_000 => format!("{} ns", span.ns),
        1_000..1_000_000 => format!("{:.1} us", ns / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", ns / 1e6),
        1_000_000_000..60_000_000_000 => format!("{:.1} s", ns / 1e9),
        long => {
            let seconds = long / 1_000_000_000;
            let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
            format!("{hours}:{minutes:02}:{:02}", seconds % 60)
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn format_bytes(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let unit = (0..4).rev().find(|power| bytes >= 1024_u64.pow(power + 1));
    match unit {
        Some(power) => {
            let scaled = bytes as f64 / 1024_u64.pow(power + 1) as f64;
            format!("{scaled:.1} {}", units[power as usize])
        }
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{format_cell, format_result};
    use crate::result_type::{FieldSchema, ResultType};

    const ROWS: ResultType = ResultType::Rows(&[
        FieldSchema::new("name", ResultType::Text, ""),
        FieldSchema::new("busy_percent", ResultType::Real, ""),
        FieldSchema::new("mask", ResultType::Maybe(&ResultType::Text), ""),
    ]);

    #[test]
    fn list_is_formatted_as_a_table_with_numbers_right_aligned() {
        let rows = json!([
            { "name": "a", "busy_percent": 5.25, "mask": "0-1" },
            { "name": "longer", "busy_percent": 100, "mask": null },
        ]);
        let expected = "\
name       busy  mask
a         5.2 %  0-1
longer  100.0 %  -
";
        assert_eq!(format_result(&ROWS, &rows), expected);
        assert_eq!(format_result(&ROWS, &json!([])), "none\n");
    }

    #[test]
    fn object_is_formatted_with_one_line_per_member() {
        const SHAPE: ResultType = ResultType::Record(&[
            FieldSchema::new("pid", ResultType::Whole, ""),
            FieldSchema::new("resident_bytes", ResultType::Whole, ""),
            FieldSchema::new("remedies", ResultType::Texts, ""),
            FieldSchema::new("io_uring", ResultType::Flag, ""),
            FieldSchema::new(
                "inner",
                ResultType::Record(&[FieldSchema::new("a", ResultType::Text, "")]),
                "",
            ),
        ]);
        let answer = json!({
            "pid": 7, "resident_bytes": 3_145_728, "remedies": ["one", "two"], "io_uring": true,
            "inner": { "a": "b" },
        });
        let expected = "\
pid       7
resident  3.0 MiB
remedies
  one
  two
io uring  yes
inner
  a  b
";
        assert_eq!(format_result(&SHAPE, &answer), expected);
    }

    #[test]
    fn number_format_follows_its_unit_suffix() {
        for (name, value, text) in [
            ("count", json!(1024), "1024"),
            ("a_ns", json!(999), "999 ns"),
            ("a_ns", json!(1_500), "1.5 us"),
            ("a_ns", json!(2_500_000), "2.5 ms"),
            ("a_ns", json!(59_900_000_000_u64), "59.9 s"),
            ("a_ns", json!(3_723_000_000_000_u64), "1:02:03"),
            ("a_bytes", json!(1023), "1023 B"),
            ("a_bytes", json!(1536), "1.5 KiB"),
            ("a_bytes", json!(5_u64 << 40), "5.0 TiB"),
            ("load", json!([1, 2]), "1 2"),
        ] {
            assert_eq!(format_cell(name, &value), text);
        }
    }

    #[test]
    fn terminal_control_characters_are_escaped() {
        assert_eq!(format_cell("name", &json!("a\u{1b}[2Jb\nc")), "a\\u{1b}[2Jb\\u{a}c");
    }
}
