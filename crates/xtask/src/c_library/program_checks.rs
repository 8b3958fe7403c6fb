//! Programs in C and C++ with the installed library: compiled without warnings, run plainly, under valgrind, and
//! with AddressSanitizer and UndefinedBehaviorSanitizer.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Workplace, conformance_table, make_empty};
use crate::package::{output_of, run_command};

const WARNINGS: [&str; 4] = ["-std=c11", "-Wall", "-Wextra", "-Werror"];
const SANITIZERS: [&str; 3] =
    ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"];

/// A program, and how it is run.
struct CheckedProgram {
    source: PathBuf,
    arguments: Vec<String>,
    /// Arguments under valgrind, where a program takes some thirty times as long.
    slow_arguments: Vec<String>,
}

/// Compiles and runs all programs. Returns what is wrong.
pub(super) fn check_programs(place: &Workplace, seed: Option<u64>) -> Result<Vec<String>, String> {
    let programs = place.room.join("programs");
    make_empty(&programs)?;
    conformance_table::write_table(&place.root, &programs.join("conformance_cases.h"))?;
    compile_in_cpp(place, &programs)?;
    let mut problems = Vec::new();
    for checked in checked_programs(place, seed)? {
        let name = checked.source.file_stem().map_or_else(String::new, lossy);
        let (plain, sanitized) = (programs.join(&name), programs.join(format!("{name}.asan")));
        compile(place, &programs, &checked.source, &plain, &[])?;
        compile(place, &programs, &checked.source, &sanitized, &SANITIZERS)?;
        let mut run = |how: &str, command: &mut Command| match output_of(&name, command) {
            Ok(output) => println!("c-library: {name}{how}: {}", last_line(&output)),
            Err(why) => problems.push(format!("{name}{how}: {why}")),
        };
        run("", program(place, &plain).args(&checked.arguments));
        run(", AddressSanitizer", program(place, &sanitized).args(&checked.arguments));
        let mut valgrind = program(place, Path::new("valgrind"));
        valgrind.args(["--quiet", "--error-exitcode=9", "--leak-check=full"]);
        valgrind.args(["--errors-for-leak-kinds=definite,indirect", "--fair-sched=yes"]);
        let suppressions = place.root.join("crates/capi/tests/valgrind.supp");
        valgrind.arg(format!("--suppressions={}", suppressions.display()));
        run(", valgrind", valgrind.arg(&plain).args(&checked.slow_arguments));
    }
    Ok(problems)
}

fn checked_programs(place: &Workplace, seed: Option<u64>) -> Result<Vec<CheckedProgram>, String> {
    let temporary = place.room.join("files");
    make_empty(&temporary)?;
    let directory = lossy(temporary.as_os_str());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    let tests = place.root.join("crates/capi/tests");
    let text = |arguments: &[&str]| arguments.iter().map(|one| (*one).to_owned()).collect();
    let mut all = vec![
        CheckedProgram {
            source: tests.join("conformance.c"),
            arguments: vec![directory.clone()],
            slow_arguments: vec![directory],
        },
        CheckedProgram {
            source: tests.join("random_calls.c"),
            arguments: vec![seed.to_string(), "100000".to_owned()],
            slow_arguments: vec![seed.to_string(), "10000".to_owned()],
        },
    ];
    for source in examples(&place.root)? {
        let (arguments, slow_arguments) = match source.file_name().and_then(OsStr::to_str) {
            Some("rate.c") => {
                (text(&["emu:null", "128", "0.2"]), text(&["null:", "32", "60", "2000"]))
            }
            Some("3_sleep.c") => (Vec::new(), text(&["emu:ram", "20"])),
            _ => (Vec::new(), Vec::new()),
        };
        all.push(CheckedProgram { source, arguments, slow_arguments });
    }
    Ok(all)
}

/// The examples, in the repository.
pub(super) fn examples(root: &Path) -> Result<Vec<PathBuf>, String> {
    let directory = root.join("crates/capi/examples");
    let refuse = |why: std::io::Error| format!("list {}: {why}", directory.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(&directory).map_err(refuse)? {
        let path = entry.map_err(refuse)?.path();
        if path.extension() == Some(OsStr::new("c")) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Compiles a file that includes the header alone, as C++.
fn compile_in_cpp(place: &Workplace, programs: &Path) -> Result<(), String> {
    let source = programs.join("header.cpp");
    let text =
        "#include <tenmil.h>\nint main() { return tenmil_error_name(TENMIL_OK)[0] != 'o'; }\n";
    fs::write(&source, text).map_err(|why| format!("write {}: {why}", source.display()))?;
    let binary = programs.join("header");
    let mut cpp = Command::new("c++");
    cpp.args(["-std=c++11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-o"]).arg(&binary);
    cpp.arg(&source).args(place.flags()?);
    run_command("compile the header as C++", &mut cpp)?;
    run_command("run a program in C++", &mut program(place, &binary))
}

fn compile(
    place: &Workplace,
    include: &Path,
    source: &Path,
    binary: &Path,
    more: &[&str],
) -> Result<(), String> {
    let mut cc = Command::new("cc");
    cc.args(WARNINGS).args(["-D_DEFAULT_SOURCE", "-O2", "-g", "-pthread"]).args(more);
    cc.arg("-I").arg(include).arg("-o").arg(binary).arg(source).args(place.flags()?);
    run_command(&format!("compile {}", source.display()), &mut cc)
}

/// A command that finds the installed library.
pub(super) fn program(place: &Workplace, binary: &Path) -> Command {
    let mut command = Command::new(binary);
    command.env("LD_LIBRARY_PATH", place.prefix.join("lib"));
    command
}

fn lossy(text: &OsStr) -> String {
    text.to_string_lossy().into_owned()
}

fn last_line(output: &str) -> &str {
    output.lines().last().unwrap_or("no output")
}
