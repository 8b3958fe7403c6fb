//! The conformance cases as a table in C.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use serde_json::Value;

/// The cases, in the repository.
const CASES: &str = "crates/capi/conformance.json";

/// Writes the table that the runner in C includes.
pub(super) fn write_table(root: &Path, to: &Path) -> Result<(), String> {
    let text =
        fs::read_to_string(root.join(CASES)).map_err(|why| format!("read {CASES}: {why}"))?;
    let cases: Value = serde_json::from_str(&text).map_err(|why| format!("read {CASES}: {why}"))?;
    let cases = cases["cases"].as_array().ok_or_else(|| format!("{CASES}: no array `cases`"))?;
    let table = table_of(cases).map_err(|why| format!("{CASES}: {why}"))?;
    fs::write(to, table).map_err(|why| format!("write {}: {why}", to.display()))
}

fn table_of(cases: &[Value]) -> Result<String, String> {
    let mut steps = String::new();
    let mut table = String::from("static const struct test_case cases[] = {\n");
    for (number, case) in cases.iter().enumerate() {
        let all = case["steps"].as_array().ok_or("a case has no steps")?;
        let _ = writeln!(steps, "static const struct step steps_{number}[] = {{");
        for step in all {
            steps.push_str(&step_line(step)?);
        }
        steps.push_str("};\n");
        let (name, device) = (c_string(&case["name"])?, c_string(&case["device"])?);
        let depth = case["depth"].as_u64().unwrap_or(0);
        let is_set = |key: &str| case[key].as_bool().unwrap_or(false);
        let flags = match (is_set("read_only"), is_set("direct")) {
            (true, _) => "TENMIL_OPEN_READ_ONLY",
            (_, true) => "TENMIL_OPEN_DIRECT",
            _ => "0",
        };
        let count = all.len();
        let _ =
            writeln!(table, "    {{{name}, {device}, {depth}, {flags}, steps_{number}, {count}}},");
    }
    Ok(format!("/* Generated from conformance.json. */\n{steps}{table}}};\n"))
}

fn step_line(step: &Value) -> Result<String, String> {
    let mut line = format!("    {{.action = {}", c_string(&step["do"])?);
    for key in ["memory", "flags", "expect", "kind", "uri", "text"] {
        if !step[key].is_null() {
            let _ = write!(line, ", .{key} = {}", c_string(&step[key])?);
        }
    }
    for key in ["fill", "fill2", "check"] {
        let byte = step[key].as_u64().map_or("-1".to_owned(), |byte| byte.to_string());
        let _ = write!(line, ", .{key} = {byte}");
    }
    for (key, field) in [
        ("lba", "lba"),
        ("source", "source"),
        ("blocks", "blocks"),
        ("accepted", "count"),
        ("completions", "count"),
        ("to", "value"),
        ("value", "value"),
    ] {
        if let Some(number) = step[key].as_u64() {
            let _ = write!(line, ", .{field} = {number}u");
        }
    }
    line.push_str("},\n");
    Ok(line)
}

fn c_string(value: &Value) -> Result<String, String> {
    let text = value.as_str().ok_or_else(|| format!("{value}, expected a string"))?;
    if text.contains(['"', '\\', '\n']) || !text.is_ascii() {
        return Err(format!("{text:?}: expected ASCII without quotes and backslashes"));
    }
    Ok(format!("\"{text}\""))
}
