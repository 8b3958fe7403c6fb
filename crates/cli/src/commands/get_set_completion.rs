//! `tenmil complete`: completion backend for bash (`complete -C`).
//!
//! bash passes the line in COMP_LINE and COMP_POINT, and splits words at `=`.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use tenmil_rpc::{MethodKind, TABLE, complete_last_word};

use super::write_stdout;
use tenmil_base::Error;

/// Complete the names of `get` and `set` for bash: complete -o nospace -C 'tenmil complete' tenmil
#[derive(Debug, Args)]
pub(super) struct CompleteArguments {
    /// Arguments that bash adds; the environment holds the same in full
    #[arg(allow_hyphen_values = true, trailing_var_arg = true)]
    _words: Vec<String>,
}

/// Prints the candidates for the next word.
pub(super) fn run_complete(out: &mut dyn Write) -> Result<ExitCode, Error> {
    let line = std::env::var("COMP_LINE").unwrap_or_default();
    let point = std::env::var("COMP_POINT").ok().and_then(|point| point.parse().ok());
    let line = point.and_then(|point| line.get(..point)).unwrap_or(&line);
    let text: String = completion_candidates(line).into_iter().map(|word| word + "\n").collect();
    write_stdout(out, &text)?;
    Ok(ExitCode::SUCCESS)
}

fn completion_candidates(line: &str) -> Vec<String> {
    let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
    let verb = match words.get(1).map(String::as_str) {
        Some("get") => MethodKind::Get,
        Some("set") => MethodKind::Set,
        _ => return Vec::new(),
    };
    // Empty words between two spaces are skipped; the last word is the one to complete.
    let Some((last, before)) = words[2..].split_last() else { return Vec::new() };
    let mut words: Vec<String> = before.iter().filter(|word| !word.is_empty()).cloned().collect();
    words.push(last.clone());
    let behind = last.find('=').map_or(0, |at| at + 1);
    let found = complete_last_word(&TABLE, verb, &words);
    found.into_iter().map(|word| word[behind..].to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::completion_candidates;

    #[test]
    fn command_line_is_completed_at_its_end() {
        assert_eq!(completion_candidates("tenmil get proc"), ["process"]);
        assert_eq!(completion_candidates("tenmil  get"), [""; 0]);
        assert!(completion_candidates("tenmil get ").len() > 3);
        assert!(completion_candidates("tenmil get  env").contains(&"environment".to_owned()));
        assert_eq!(completion_candidates("tenmil perf "), [""; 0]);
        assert_eq!(completion_candidates(""), [""; 0]);
    }
}
