//! What is made for shells and for `man` is something that those take.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};

fn run_tenmil(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tenmil")).args(arguments).output().expect("it starts")
}

fn completions(shell: &str) -> String {
    let output = run_tenmil(&["completions", shell]);
    assert!(output.status.success(), "{shell}");
    String::from_utf8(output.stdout).expect("text")
}

/// What bash offers at the end of `line`.
fn offered_candidates(line: &str) -> Vec<String> {
    let script = format!(
        "{}\nCOMP_LINE='{line}' COMP_POINT=${{#COMP_LINE}}\nCOMP_POINT=${{#COMP_LINE}}\n\
         read -ra COMP_WORDS <<< \"$COMP_LINE\"; COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n\
         compopt() {{ :; }}\n\
         _tenmil_or_method tenmil \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD-1]}}\"\n\
         printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        completions("bash")
    );
    let program = Path::new(env!("CARGO_BIN_EXE_tenmil")).parent().expect("a directory");
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap_or_default());
    // Longer than an argument may be.
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(script.as_bytes()).expect("it is written");
    let output = Command::new("bash").arg(file.path()).env("PATH", path).output();
    let output = output.expect("bash starts");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{line}");
    let text = String::from_utf8(output.stdout).expect("text");
    text.lines().filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_flags_and_methods() {
    assert_eq!(offered_candidates("tenmil disc"), ["discover"]);
    assert_eq!(offered_candidates("tenmil perf --base"), ["--baseline"]);
    assert_eq!(offered_candidates("tenmil volume snap"), ["snapshot"]);
    // From the table of methods, which no command line has.
    assert_eq!(offered_candidates("tenmil get proc"), ["process"]);
}

#[test]
fn every_other_shell_gets_its_own_script() {
    for (shell, mark) in
        [("zsh", "#compdef tenmil"), ("fish", "complete -c tenmil"), ("elvish", "edit:completion")]
    {
        let script = completions(shell);
        assert!(script.contains(mark) && script.contains("discover"), "{shell}");
    }
    let output = run_tenmil(&["completions", "csh"]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).expect("text");
    assert!(text.contains("csh: expected bash, elvish, fish"), "{text}");
}

#[test]
fn zsh_and_fish_complete_devices_as_paths() {
    let zsh = completions("zsh");
    for argument in ["'::uri -- ", "':volume -- ", "':source -- "] {
        let line = zsh.lines().find(|line| line.contains(argument)).unwrap_or_default();
        assert!(line.contains(":_files'"), "{argument}: {line}");
    }
    let fish = completions("fish");
    let add =
        fish.lines().find(|line| line.contains("subcommand_from grow") && line.contains("-l add"));
    assert!(add.is_some_and(|line| line.contains("-F")), "{add:?}");
}

#[test]
fn each_command_has_a_manual_page_with_its_examples() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().display().to_string();
    let output = run_tenmil(&["man", &path]);
    assert!(output.status.success());
    let count = std::fs::read_dir(&path).expect("it is there").count();
    let said = String::from_utf8(output.stdout).expect("text");
    assert_eq!(said, format!("{count} pages in {path}\n"));
    assert!(count > 20, "{count}");
    let page = |name: &str| std::fs::read_to_string(directory.path().join(name)).expect(name);
    assert!(page("tenmil.1").contains("tenmil\\-serve(1)"), "{}", page("tenmil.1"));
    let serve = page("tenmil-serve.1");
    assert!(serve.contains(".TH tenmil-serve 1") && serve.contains("Examples:"), "{serve}");
    assert!(page("tenmil-volume-snapshot.1").contains("snapshot"));

    let output = run_tenmil(&["man", "/nowhere"]);
    assert_eq!(output.status.code(), Some(2));
}
