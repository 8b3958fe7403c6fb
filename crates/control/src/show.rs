//! Answers as people read them. How a number is written follows from the end of its name.

use base::Span;
use serde_json::Value;

use crate::shape::{Field, Shape};

/// An answer of this shape as a table: a list of objects by rows, one object by lines.
pub fn show(shape: &Shape, answer: &Value) -> String {
    match (shape, answer) {
        (Shape::Maybe(shape), answer) if !answer.is_null() => show(shape, answer),
        (Shape::Rows(fields), Value::Array(rows)) => table(fields, rows),
        (Shape::Record(fields), Value::Object(_)) => lines(fields, answer),
        (Shape::Texts, Value::Array(list)) => {
            list.iter().map(|item| cell("", item) + "\n").collect()
        }
        _ => format!("{answer:#}\n"),
    }
}

/// A line of heads and one for each row; what does not fit into a cell stands below its row.
fn table(fields: &[Field], rows: &[Value]) -> String {
    if rows.is_empty() {
        return "none\n".into();
    }
    let (flat, nested): (Vec<&Field>, Vec<&Field>) =
        fields.iter().partition(|field| field.shape.fields().is_empty());
    let columns: Vec<Column> = flat.into_iter().map(|field| Column::of(field, rows)).collect();
    let mut text = line(columns.iter().map(|column| column.padded(&column.head)));
    for (index, row) in rows.iter().enumerate() {
        text += &line(columns.iter().map(|column| column.padded(&column.cells[index])));
        for field in &nested {
            text += &indented(&show(&field.shape, &row[field.name]));
        }
    }
    text
}

struct Column {
    head: String,
    cells: Vec<String>,
    width: usize,
    is_number: bool,
}

impl Column {
    fn of(field: &Field, rows: &[Value]) -> Self {
        let head = title(field.name);
        let cells: Vec<String> =
            rows.iter().map(|row| cell(field.name, &row[field.name])).collect();
        let width = cells.iter().chain([&head]).map(|text| text.chars().count()).max();
        let is_number = rows.iter().all(|row| row[field.name].is_number());
        Self { head, cells, width: width.unwrap_or(0), is_number }
    }

    /// Numbers stand to the right.
    fn padded(&self, text: &str) -> String {
        let space = " ".repeat(self.width - text.chars().count());
        if self.is_number { space + text } else { text.to_owned() + &space }
    }
}

fn line(cells: impl Iterator<Item = String>) -> String {
    let cells: Vec<String> = cells.collect();
    cells.join("  ").trim_end().to_owned() + "\n"
}

/// A line for each member; what does not fit into a line stands below its name.
fn lines(fields: &[Field], record: &Value) -> String {
    let width = fields.iter().map(|field| title(field.name).chars().count()).max().unwrap_or(0);
    let one = |field: &Field| {
        let (name, value) = (title(field.name), &record[field.name]);
        let is_long = match value {
            Value::Array(list) => !field.shape.fields().is_empty() || list.len() > 1,
            Value::Object(_) => !field.shape.fields().is_empty(),
            _ => false,
        };
        if is_long && !matches!(field.shape, Shape::Wholes) {
            format!("{name}\n{}", indented(&show(&field.shape, value)))
        } else {
            line([format!("{name:<width$}"), cell(field.name, value)].into_iter())
        }
    };
    fields.iter().map(one).collect()
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

/// A name without its unit, which is shown with the number, and without underscores.
fn title(name: &str) -> String {
    let units = ["_ns", "_bytes", "_percent"];
    let bare = units.iter().find_map(|unit| name.strip_suffix(unit)).unwrap_or(name);
    bare.replace('_', " ")
}

fn cell(name: &str, value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::Bool(flag) => if *flag { "yes" } else { "no" }.into(),
        // On one line, whatever is in it.
        Value::String(text) => text.chars().flat_map(plain).collect(),
        Value::Number(number) => match number.as_u64() {
            Some(ns) if name.ends_with("_ns") => span(Span { ns }),
            Some(bytes) if name.ends_with("_bytes") => size(bytes),
            _ if name.ends_with("_percent") => {
                format!("{:.1} %", number.as_f64().unwrap_or_default())
            }
            _ => number.to_string(),
        },
        Value::Array(list) => {
            let items: Vec<String> = list.iter().map(|item| cell(name, item)).collect();
            items.join(" ")
        }
        Value::Object(_) => value.to_string(),
    }
}

/// A terminal acts on some characters; those are shown and not sent.
fn plain(character: char) -> Vec<char> {
    if base::text::acts(character) { character.escape_unicode().collect() } else { vec![character] }
}

/// A time with three or so digits and the unit that makes them readable.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn span(span: Span) -> String {
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
fn size(bytes: u64) -> String {
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

    use super::{cell, show};
    use crate::shape::{Field, Shape};

    const ROWS: Shape = Shape::Rows(&[
        Field::new("name", Shape::Text, ""),
        Field::new("busy_percent", Shape::Real, ""),
        Field::new("mask", Shape::Maybe(&Shape::Text), ""),
    ]);

    #[test]
    fn a_list_is_a_table_with_numbers_to_the_right() {
        let rows = json!([
            { "name": "a", "busy_percent": 5.25, "mask": "0-1" },
            { "name": "longer", "busy_percent": 100, "mask": null },
        ]);
        let expected = "\
name       busy  mask
a         5.2 %  0-1
longer  100.0 %  -
";
        assert_eq!(show(&ROWS, &rows), expected);
        assert_eq!(show(&ROWS, &json!([])), "none\n");
    }

    #[test]
    fn an_object_is_a_line_for_each_member() {
        const SHAPE: Shape = Shape::Record(&[
            Field::new("pid", Shape::Whole, ""),
            Field::new("resident_bytes", Shape::Whole, ""),
            Field::new("remedies", Shape::Texts, ""),
            Field::new("io_uring", Shape::Flag, ""),
            Field::new("inner", Shape::Record(&[Field::new("a", Shape::Text, "")]), ""),
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
        assert_eq!(show(&SHAPE, &answer), expected);
    }

    #[test]
    fn a_number_is_written_as_its_name_ends() {
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
            assert_eq!(cell(name, &value), text);
        }
    }

    #[test]
    fn a_terminal_is_not_given_orders() {
        assert_eq!(cell("name", &json!("a\u{1b}[2Jb\nc")), "a\\u{1b}[2Jb\\u{a}c");
    }
}
