//! The binary interface: exported symbols and layouts of structures, compared with what is recorded.

use std::fmt::Write;
use std::fs;
use std::process::Command;

use super::Workplace;
use super::header::HEADER;
use crate::package::{output_of, run_command};

/// What is recorded, in the repository.
const RECORD: &str = "crates/capi/libtenmil.abi";

/// Compares the interface with the record, or records it. Returns what differs.
pub(super) fn check_abi(place: &Workplace, is_recording: bool) -> Result<Vec<String>, String> {
    let found = format!("{}{}", symbols(place)?, layouts(place)?);
    let path = place.root.join(RECORD);
    if is_recording {
        fs::write(&path, found).map_err(|why| format!("write {RECORD}: {why}"))?;
        return Ok(Vec::new());
    }
    let recorded = fs::read_to_string(&path).map_err(|why| format!("read {RECORD}: {why}"))?;
    let mut problems = Vec::new();
    for line in recorded.lines().filter(|line| !found.lines().any(|other| other == *line)) {
        problems.push(format!("`{line}` is missing: programs that were compiled before need it"));
    }
    for line in found.lines().filter(|line| !recorded.lines().any(|other| other == *line)) {
        problems.push(format!("`{line}` is new: run `cargo xtask c-library --record`"));
    }
    Ok(problems)
}

/// One line for each exported symbol, with its version.
fn symbols(place: &Workplace) -> Result<String, String> {
    let mut nm = Command::new("nm");
    nm.args(["--dynamic", "--defined-only", "--with-symbol-versions"]);
    nm.arg(place.prefix.join("lib/libtenmil.so"));
    let mut names: Vec<String> = output_of("list the symbols", &mut nm)?
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2))
        .filter(|name| !name.starts_with("TENMIL_"))
        .map(|name| format!("symbol {name}\n"))
        .collect();
    names.sort();
    Ok(names.concat())
}

/// One line for each structure with its size, and one for each field with its offset and size.
fn layouts(place: &Workplace) -> Result<String, String> {
    let header = fs::read_to_string(place.root.join(HEADER))
        .map_err(|why| format!("read {HEADER}: {why}"))?;
    let mut program = String::from("#include <stdio.h>\n#include <tenmil.h>\nint main(void)\n{\n");
    let mut current = None;
    for line in header.lines() {
        if let Some(name) =
            line.strip_prefix("typedef struct ").and_then(|rest| rest.strip_suffix(" {"))
        {
            let _ =
                writeln!(program, "    printf(\"struct {name} %zu\\n\", sizeof(struct {name}));");
            current = Some(name.to_owned());
        } else if line.starts_with('}') {
            current = None;
        } else if let (Some(name), Some(field)) = (&current, field_name(line)) {
            let _ = writeln!(
                program,
                "    printf(\"field {name}.{field} %zu %zu\\n\", offsetof(struct {name}, {field}), \
                 sizeof(((struct {name} *)0)->{field}));"
            );
        }
    }
    program.push_str("    return 0;\n}\n");
    let (source, binary) = (place.room.join("layouts.c"), place.room.join("layouts"));
    fs::write(&source, program).map_err(|why| format!("write {}: {why}", source.display()))?;
    let mut cc = Command::new("cc");
    cc.arg("-o").arg(&binary).arg(&source).args(place.flags()?);
    run_command("compile the list of layouts", &mut cc)?;
    let list = output_of("list the layouts", &mut super::program_checks::program(place, &binary))?;
    Ok(format!("{list}\n"))
}

/// Name of the field that a line of a structure declares.
fn field_name(line: &str) -> Option<&str> {
    let declaration = line.trim().strip_suffix(';')?;
    if let Some((_, pointer)) = declaration.split_once("(*") {
        return pointer.split_once(')').map(|(name, _)| name);
    }
    let name = declaration.rsplit([' ', '*']).next()?;
    (!declaration.starts_with('*') && !declaration.starts_with('/')).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::field_name;

    #[test]
    fn field_is_found_in_its_declaration() {
        assert_eq!(field_name("  uint64_t lba;"), Some("lba"));
        assert_eq!(field_name("  const struct tenmil_segment *segments;"), Some("segments"));
        assert_eq!(field_name("  int32_t (*poll)(void*, uint32_t);"), Some("poll"));
        assert_eq!(field_name("   * memory; it"), None);
        assert_eq!(field_name("   * of the library;"), None);
    }
}
