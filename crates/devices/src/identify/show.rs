//! Rendering of a document as text.

use core::fmt::Write;

use tenmil_wire::layout::{DecodedField, FieldValue};

use super::IdentifyDocument;

/// Renders the document as text. Fields that are zero are left out unless `all` is set.
pub fn text(document: &IdentifyDocument, all: bool) -> String {
    let mut out = String::new();
    let mut left_out = 0;
    for section in &document.sections {
        let _ = writeln!(out, "{}", section.title);
        let before = out.len();
        for field in &section.fields {
            write_field(&mut out, field, all, &mut left_out);
        }
        if out.len() == before {
            out += "  (all zero)\n";
        }
        out.push('\n');
    }
    if !document.rejected.is_empty() {
        out += "Rejected\n";
        for (title, status) in &document.rejected {
            let _ = writeln!(out, "  {title}: {status}");
        }
        out.push('\n');
    }
    if left_out > 0 {
        let _ = writeln!(out, "{left_out} fields are zero and left out; --all shows them.");
    }
    out
}

fn write_field(out: &mut String, field: &DecodedField, all: bool, left_out: &mut u32) {
    if field.value.is_zero() && !all {
        *left_out += 1;
        return;
    }
    if let FieldValue::List(values) = &field.value {
        write_list(out, field, values, all);
        return;
    }
    write_line(out, 2, field.name, &show(&field.value), field.description);
    for part in &field.parts {
        if all || !part.value.is_zero() {
            write_line(out, 4, part.name, &show(&part.value), part.description);
        }
    }
}

/// Writes a list: numbers on one line, structures on one line each, without zero entries.
fn write_list(out: &mut String, field: &DecodedField, values: &[FieldValue], all: bool) {
    let values = without_trailing_zeroes(values);
    if values.iter().all(|value| matches!(value, FieldValue::Number(_))) {
        let shown: Vec<String> = values.iter().map(show).collect();
        write_line(out, 2, field.name, &shown.join(" "), field.description);
        return;
    }
    write_line(out, 2, field.name, "", field.description);
    for (index, value) in values.iter().enumerate() {
        if all || !value.is_zero() {
            let _ = writeln!(out, "    [{index:#04x}] {}", show(value));
        }
    }
}

fn write_line(out: &mut String, indent: usize, name: &str, value: &str, meaning: &str) {
    let meaning = meaning.trim().trim_end_matches('.');
    let width = 26 - indent;
    let line = format!("{:indent$}{name:<width$} {value:<28} {meaning}", "");
    let _ = writeln!(out, "{}", line.trim_end());
}

fn show(value: &FieldValue) -> String {
    match value {
        FieldValue::Flag(true) => "yes".into(),
        FieldValue::Flag(false) => "no".into(),
        FieldValue::Number(number @ 0..=9) => number.to_string(),
        FieldValue::Number(number) => format!("{number} ({number:#x})"),
        FieldValue::Code(code, name) => format!("{} ({code:#x})", name.trim_end_matches('.')),
        FieldValue::Text(text) => {
            format!("\"{}\"", tenmil_base::text::escape(&text.escape_debug().to_string()))
        }
        FieldValue::Bytes(_) => value.to_string(),
        FieldValue::Structure(fields) => {
            let fields = fields.iter().filter(|field| !field.value.is_zero());
            let shown: Vec<String> = fields.map(field_part_text).collect();
            shown.join(", ")
        }
        FieldValue::List(values) => {
            let shown: Vec<String> = without_trailing_zeroes(values).iter().map(show).collect();
            format!("[{}]", shown.join(", "))
        }
    }
}

fn field_part_text(field: &DecodedField) -> String {
    match &field.value {
        FieldValue::Flag(_) => field.name.into(),
        value => format!("{} {}", field.name, show(value)),
    }
}

/// `values` up to the last nonzero one.
pub fn without_trailing_zeroes(values: &[FieldValue]) -> &[FieldValue] {
    let end = values.iter().rposition(|value| !value.is_zero()).map_or(0, |last| last + 1);
    &values[..end]
}
