//! Execution of the commands of a page in a shell.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::page_commands::DocCommand;

/// Environment of the commands.
pub(super) struct PageRunner {
    root: PathBuf,
    binary: PathBuf,
    /// Command prefix that runs a shell in a network namespace of its own, if that is possible.
    apart: Vec<&'static str>,
}

/// Time limit of a page in seconds, without and with long blocks.
const LIMIT_S: [u32; 2] = [240, 3000];

/// Exit code of `timeout` after the time limit.
const OUT_OF_TIME: i32 = 124;

/// Prologue of the script of every page.
const PREAMBLE: &str = r#"
exec 3>&1 >output 2>&1
set -euo pipefail
cargo() ( cd "$PROJECT" && command cargo "$@" )
command -v sudo >/dev/null || sudo() { "$@"; }
awaited() {
    for _ in $(seq 150); do
        if grep -q ready "$1"; then return 0; fi
        if ! kill -0 "$2" 2>/dev/null; then break; fi
        sleep 0.1
    done
    cat "$1"
    echo 'it has not printed ready'
    return 1
}
ended() {
    status=$?
    trap - EXIT
    if [ "$status" != 0 ]; then
        printf 'exit code %s of %s\n' "$status" "$at" >&3
        tail -n 40 output >&3
    fi
    for job in $(jobs -p); do kill "$job" 2>/dev/null || true; done
    wait
    exit "$status"
}
trap ended EXIT
if [ -n "$APART" ]; then ip link set lo up; fi
"#;

impl PageRunner {
    pub(super) fn new(root: &Path, binary: &Path) -> Result<Self, String> {
        if binary.file_name().is_none_or(|name| name != "tenmil") {
            return Err(format!("{} is not called tenmil", binary.display()));
        }
        let apart = ["unshare", "--map-root-user", "--net"];
        let mut probe = Command::new(apart[0]);
        probe.args(&apart[1..]).args(["ip", "link", "set", "lo", "up"]);
        let probed = probe.stdout(Stdio::null()).stderr(Stdio::null()).status();
        let apart =
            if probed.is_ok_and(|status| status.success()) { apart.to_vec() } else { vec![] };
        Ok(Self { root: root.to_owned(), binary: binary.to_owned(), apart })
    }

    /// Runs the commands of a page; returns the number of successful ones.
    pub(super) fn run_page(
        &self,
        page: &str,
        commands: &[&DocCommand],
        is_long: bool,
        failed: &mut Vec<String>,
    ) -> Result<usize, String> {
        let room = Command::new("mktemp").arg("-d").output();
        let room = room.map_err(|why| format!("make a directory: {why}"))?;
        let room = PathBuf::from(String::from_utf8_lossy(&room.stdout).trim());
        let limit = LIMIT_S[usize::from(is_long)].to_string();
        let mut words = self.apart.clone();
        words.extend(["timeout", "--kill-after=10", &limit, "bash", "-c"]);
        let mut shell = Command::new(words[0]);
        shell.args(&words[1..]).arg(page_script(page, commands)).stdin(Stdio::null());
        self.set_up_environment(&mut shell, &room);
        let status = shell.status().map_err(|why| format!("run {}: {why}", words[0]));
        let typed = std::fs::read_to_string(room.join("typed")).unwrap_or_default();
        let _ = std::fs::remove_dir_all(&room);
        let mut count = typed.lines().count();
        let status = status?;
        if !status.success() {
            let last = typed.lines().last().unwrap_or(page);
            let is_late = status.code() == Some(OUT_OF_TIME);
            let why =
                if is_late { format!(", after {limit} s for the page") } else { String::new() };
            failed.push(format!("{last}{why}"));
            count -= 1;
        }
        Ok(count)
    }

    /// Only checks that `tenmil` accepts the options of a command; false if the command does not call
    /// it.
    pub(super) fn check_options(
        &self,
        page: &str,
        command: &DocCommand,
        failed: &mut Vec<String>,
    ) -> Result<bool, String> {
        let text = command.text.trim_end_matches('&').trim();
        let text = text.strip_prefix("sudo ").unwrap_or(text);
        if !text.starts_with("tenmil ") || text.contains('|') {
            return Ok(false);
        }
        let mut shell = Command::new("bash");
        shell.arg("-c").arg(format!("{text} --help >/dev/null"));
        self.set_up_environment(&mut shell, &self.root);
        let status = shell.status().map_err(|why| format!("run bash: {why}"))?;
        if !status.success() {
            failed.push(format!("{page}:{}: {}", command.line, command.text));
        }
        Ok(true)
    }

    fn set_up_environment(&self, shell: &mut Command, room: &Path) {
        let before = std::env::var("PATH").unwrap_or_default();
        let beside = self.binary.parent().map_or_else(String::new, |at| at.display().to_string());
        shell
            .current_dir(room)
            .env("PATH", format!("{beside}:{before}"))
            .env("PROJECT", &self.root)
            .env("APART", self.apart.join(" "))
            // Hides the processes of other pages.
            .env("TENMIL_RUNTIME_DIR", room.join("tenmil"));
    }
}

/// The commands as a script that reports the line of each.
fn page_script(page: &str, commands: &[&DocCommand]) -> String {
    let mut script = PREAMBLE.to_owned();
    for (number, command) in commands.iter().enumerate() {
        let first = command.text.lines().next().unwrap_or_default();
        let at = format!("{page}:{}: {first}", command.line).replace('\'', r"'\''");
        let _ = writeln!(script, "at='{at}'; echo \"$at\" | tee -a typed >&3");
        let _ = match command.text.strip_suffix('&') {
            Some(served) => writeln!(
                script,
                "{} >served-{number} 2>&1 &\nawaited served-{number} $!",
                served.trim_end()
            ),
            None => writeln!(script, "{}", command.text),
        };
    }
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_runner(directory: &Path) -> PageRunner {
        let binary = directory.join("tenmil");
        // A stand-in that rejects one option.
        let text =
            "#!/bin/sh\ncase \"$*\" in *--bad*) exit 2;; *serve*) echo ready; sleep 9;; esac\n";
        std::fs::write(&binary, text).unwrap();
        Command::new("chmod").arg("+x").arg(&binary).status().unwrap();
        PageRunner::new(directory, &binary).unwrap()
    }

    fn numbered_doc_commands(lines: &[&str]) -> Vec<DocCommand> {
        let typed =
            |(at, text): (usize, &&str)| DocCommand { line: at + 1, text: (*text).to_owned() };
        lines.iter().enumerate().map(typed).collect()
    }

    fn run_test_page(lines: &[&str]) -> (usize, Vec<String>) {
        let directory = tempfile::tempdir().unwrap();
        let (commands, mut failed) = (numbered_doc_commands(lines), Vec::new());
        let commands: Vec<&DocCommand> = commands.iter().collect();
        let count =
            test_runner(directory.path()).run_page("page", &commands, false, &mut failed).unwrap();
        (count, failed)
    }

    #[test]
    fn commands_run_in_order_and_servers_end_with_their_page() {
        let (count, failed) =
            run_test_page(&["echo 'it' > there", "tenmil serve &", "grep it there && kill -0 $!"]);
        assert_eq!((count, failed), (3, vec![]));
    }

    #[test]
    fn failing_command_is_named_and_ends_its_page() {
        let (count, failed) = run_test_page(&["true", "false 'x'", "true"]);
        assert_eq!((count, failed), (1, vec!["page:2: false 'x'".to_owned()]));
        let (count, failed) = run_test_page(&["false | cat"]);
        assert_eq!((count, failed.len()), (0, 1), "a pipe fails with what is in it");
        let (_, failed) = run_test_page(&["tenmil list &"]);
        assert_eq!(failed.len(), 1, "it never says ready");
    }

    #[test]
    fn commands_that_are_not_run_are_checked() {
        let directory = tempfile::tempdir().unwrap();
        let (bench, mut failed) = (test_runner(directory.path()), Vec::new());
        let checked: Vec<bool> =
            numbered_doc_commands(&["sudo tenmil bind x", "modprobe x", "tenmil list --bad"])
                .iter()
                .map(|command| bench.check_options("page", command, &mut failed).unwrap())
                .collect();
        assert_eq!(checked, [true, false, true]);
        assert_eq!(failed, ["page:3: tenmil list --bad"]);
    }
}
