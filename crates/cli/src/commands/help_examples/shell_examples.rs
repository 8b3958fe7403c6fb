//! The examples of help pages, methods and documents, passed through bash and zsh.
//!
//! Each shell runs the line with a function `tenmil` that records its arguments, and every other command without
//! effect. They are compared with the words of the line, in which quotes are the only special characters: a shell
//! that takes a character of a name for a pattern either fails or passes something else.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use super::super::clap_command;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Options that make a pattern without a match an error, as in an interactive zsh.
const SHELLS: [(&str, &[&str], &str); 2] =
    [("bash", &["--norc", "-c"], "shopt -s failglob"), ("zsh", &["-f", "-c"], "setopt nomatch")];

/// Directories below the home directory that examples write to.
const DIRECTORIES: [&str; 3] =
    [".zfunc", ".config/fish/completions", ".local/share/bash-completion/completions"];

/// Words that separate commands; the file follows the last two.
const SEPARATORS: [&str; 5] = ["|", "||", "&&", ";", "&"];
const REDIRECTIONS: [&str; 2] = [">", "<"];

/// A command line with the place where it is shown.
struct ShellExample {
    place: String,
    line: String,
}

/// A word of a command line, and whether a part of it was quoted.
struct ShellWord {
    text: String,
    is_quoted: bool,
}

/// Splits a line at spaces outside quotes. A comment ends it.
fn split_words(line: &str) -> Vec<ShellWord> {
    let mut words = Vec::new();
    let mut word: Option<ShellWord> = None;
    let mut quote = None;
    for character in line.chars() {
        match (quote, character) {
            (None, ' ') => words.extend(word.take()),
            (None, '#') if word.is_none() => break,
            (None, '\'' | '"') => {
                quote = Some(character);
                word.get_or_insert(ShellWord { text: String::new(), is_quoted: true }).is_quoted =
                    true;
            }
            (Some(open), _) if open == character => quote = None,
            _ => {
                let empty = ShellWord { text: String::new(), is_quoted: false };
                word.get_or_insert(empty).text.push(character);
            }
        }
    }
    assert_eq!(quote, None, "a quote is open: {line}");
    words.extend(word);
    words
}

/// The commands of a line, each with its arguments, as they are meant.
fn commands_of_line(line: &str, home: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut is_file = false;
    for ShellWord { text, is_quoted } in split_words(line) {
        let is = |list: &[&str]| !is_quoted && list.contains(&text.as_str());
        if std::mem::take(&mut is_file) {
            continue;
        }
        if is(&SEPARATORS) {
            commands.push(Vec::new());
        } else if is(&REDIRECTIONS) {
            is_file = true;
        } else if let Some(first) = text.strip_prefix("<(").filter(|_| !is_quoted) {
            commands.push(vec![first.to_owned()]);
        } else if let Some(command) = commands.last_mut() {
            let text = match text.strip_prefix('~').filter(|_| !is_quoted) {
                Some(below) => format!("{home}{below}"),
                None => text,
            };
            let is_inside = line.contains("<(") && !is_quoted;
            command.push(text.strip_suffix(')').filter(|_| is_inside).unwrap_or(&text).to_owned());
        }
    }
    for command in &mut commands {
        if command.first().is_some_and(|word| word == "sudo") {
            command.remove(0);
        }
    }
    commands.retain(|command| !command.is_empty());
    commands
}

/// The examples of a help text: a line each with two spaces in front, or with six below the command it belongs to;
/// a remark follows after two spaces.
fn examples_of_help(place: &str, help: &str, examples: &mut Vec<ShellExample>) {
    let lines = help.lines().skip_while(|line| !["Example:", "Examples:"].contains(line)).skip(1);
    for line in lines.take_while(|line| !line.is_empty()) {
        assert!(line.chars().count() <= 100, "{place}: longer than a line of help: {line}");
        let command = line.trim_start();
        let indent = line.len() - command.len();
        assert!([2, 6].contains(&indent) || indent > 10, "{place}: {line}");
        if indent > 10 {
            continue;
        }
        let command = command.split("  ").next().unwrap_or_default().to_owned();
        match examples.last_mut().filter(|last| last.place == place && last.line.ends_with('|')) {
            Some(last) => {
                last.line.push(' ');
                last.line += &command;
            }
            None => examples.push(ShellExample { place: place.to_owned(), line: command }),
        }
    }
}

fn examples_of_commands(command: &clap::Command, place: &str, examples: &mut Vec<ShellExample>) {
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    examples_of_help(place, &help, examples);
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        examples_of_commands(inner, &format!("{place} {}", inner.get_name()), examples);
    }
}

/// The lines of a page's shell blocks that call tenmil, without variables.
fn examples_of_page(path: &Path, examples: &mut Vec<ShellExample>) {
    let text = std::fs::read_to_string(path).expect("a page");
    let mut is_block = false;
    let mut whole = String::new();
    for (number, line) in text.lines().enumerate() {
        if line.starts_with("```") {
            is_block = !is_block && line == "```sh";
            continue;
        }
        if let Some(begun) = line.strip_suffix('\\').filter(|_| is_block) {
            whole += begun;
            continue;
        }
        let line = std::mem::take(&mut whole) + line;
        let is_call = ["tenmil ", "sudo tenmil "].iter().any(|call| line.starts_with(call));
        if is_block && is_call && !line.contains('$') {
            let name = path.file_name().expect("a file").display();
            examples.push(ShellExample { place: format!("{name}:{}", number + 1), line });
        }
    }
}

fn examples_of_pages(directory: &Path, examples: &mut Vec<ShellExample>) {
    for entry in std::fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("a page").path();
        if path.is_dir() {
            examples_of_pages(&path, examples);
        } else if path.extension().is_some_and(|end| end == "md") {
            examples_of_page(&path, examples);
        }
    }
}

/// All examples.
fn all_examples() -> Vec<ShellExample> {
    let mut examples = Vec::new();
    examples_of_commands(&clap_command(), "tenmil", &mut examples);
    for method in tenmil_rpc::TABLE.methods() {
        let (place, line) = (method.name.to_owned(), method.example.to_owned());
        examples.push(ShellExample { place, line });
    }
    examples_of_page(&Path::new(ROOT).join("README.md"), &mut examples);
    examples_of_pages(&Path::new(ROOT).join("docs"), &mut examples);
    examples
}

/// Runs a line in a shell and returns the arguments of each call of tenmil, or the messages of the shell.
fn arguments_received(
    shell: (&str, &[&str], &str),
    home: &Path,
    line: &str,
    others: &[String],
) -> Result<Vec<Vec<String>>, String> {
    let (program, arguments, options) = shell;
    let records = tempfile::tempdir_in(home).expect("a directory");
    let mut script = format!(
        "{options}\n\
         tenmil() {{ local record=$(mktemp \"$RECORDS/XXXXXX\"); \
         if [ $# -gt 0 ]; then printf '%s\\0' \"$@\" > \"$record\"; fi; }}\n\
         sudo() {{ \"$@\"; }}\n"
    );
    for other in others {
        let _ = writeln!(script, "function {other} {{ :; }}");
    }
    let _ = writeln!(script, "{line}\nwait");
    let ran = Command::new(program)
        .args(arguments)
        .arg(script)
        .current_dir(home)
        .env("HOME", home)
        .env("RECORDS", records.path())
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    let said = String::from_utf8_lossy(&ran.stderr);
    if !said.is_empty() {
        return Err(said.into_owned());
    }
    let mut calls: Vec<Vec<String>> = std::fs::read_dir(records.path())
        .expect("the records")
        .map(|entry| {
            let record = std::fs::read_to_string(entry.expect("a record").path()).expect("text");
            record.split_terminator('\0').map(str::to_owned).collect()
        })
        .collect();
    calls.sort();
    Ok(calls)
}

fn is_installed(shell: &str) -> bool {
    let found = Command::new(shell).args(["-c", "exit"]).output().is_ok();
    assert!(
        found || std::env::var_os("TENMIL_REQUIRE_TOOLS").is_none(),
        "{shell} is not installed, and TENMIL_REQUIRE_TOOLS is set"
    );
    found
}

#[test]
fn every_example_reaches_the_program_as_written_in_bash_and_zsh() {
    let directory = tempfile::tempdir().expect("a directory");
    let home = directory.path();
    for below in DIRECTORIES {
        std::fs::create_dir_all(home.join(below)).expect("a directory");
    }
    std::fs::File::create_new(home.join("monday.stream")).expect("a file");
    let examples = all_examples();
    assert!(examples.len() > 150, "{} examples", examples.len());
    let mut wrong = String::new();
    for shell in SHELLS.into_iter().filter(|(shell, ..)| is_installed(shell)) {
        for ShellExample { place, line } in &examples {
            let commands = commands_of_line(line, &home.display().to_string());
            let (mut meant, others): (Vec<_>, Vec<_>) =
                commands.into_iter().partition(|command| command[0] == "tenmil");
            for call in &mut meant {
                call.remove(0);
            }
            meant.sort();
            let mut others: Vec<String> = others.into_iter().map(|mut all| all.remove(0)).collect();
            others.retain(|other| other != "source");
            let found = arguments_received(shell, home, line, &others);
            if found.as_ref() != Ok(&meant) {
                let _ = writeln!(wrong, "{}, {place}: {line}\n  {found:?}", shell.0);
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn unquoted_pattern_does_not_reach_the_program() {
    let directory = tempfile::tempdir().expect("a directory");
    let home = directory.path();
    std::fs::File::create_new(home.join("null:xsize=1")).expect("a file");
    for shell in SHELLS.into_iter().filter(|(shell, ..)| is_installed(shell)) {
        for line in
            ["tenmil perf null:?size=1", "tenmil set x a*", "tenmil list volume:[ram:1g]/db"]
        {
            let meant = commands_of_line(line, "/").remove(0)[1..].to_vec();
            assert_ne!(arguments_received(shell, home, line, &[]), Ok(vec![meant]), "{line}");
        }
        let line = "tenmil perf 'null:?size=1' \"a b\" x,y";
        let meant = ["perf", "null:?size=1", "a b", "x,y"].map(str::to_owned).to_vec();
        assert_eq!(arguments_received(shell, home, line, &[]), Ok(vec![meant]));
    }
}
