//! `tenmil completions`: prints shell completion scripts.

use std::io::Write;
use std::process::ExitCode;

use clap::{Args, Command};
use clap_complete::{Shell, generate};

use super::write_stdout;
use tenmil_base::Error;

/// Print a shell completion script.
///
/// The bash script also completes the method names of `get` and `set`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct CompletionsArguments {
    /// Shell to generate the script for
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

const EXAMPLES: &str = "\
Examples:
  source <(tenmil completions bash)                      in this shell
  tenmil completions bash > ~/.local/share/bash-completion/completions/tenmil
  tenmil completions zsh > ~/.zfunc/_tenmil              with ~/.zfunc in fpath
  tenmil completions fish > ~/.config/fish/completions/tenmil.fish";

/// bash function that completes RPC methods, which are in the method table and not in clap's grammar.
const METHODS: &str = r#"
_tenmil_or_method() {
    case ${COMP_WORDS[1]} in
        get | set)
            compopt -o nospace
            mapfile -t COMPREPLY < <(COMP_LINE=$COMP_LINE COMP_POINT=$COMP_POINT tenmil complete)
            ;;
        *) _tenmil "$@" ;;
    esac
}
complete -F _tenmil_or_method -o bashdefault -o default tenmil
"#;

/// Prints the script of the shell.
pub(super) fn run_completions(
    arguments: &CompletionsArguments,
    mut command: Command,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let mut script = Vec::new();
    generate(arguments.shell, &mut command, "tenmil", &mut script);
    let mut script = String::from_utf8_lossy(&script).into_owned();
    if arguments.shell == Shell::Bash {
        script += METHODS;
    }
    write_stdout(out, &script)?;
    Ok(ExitCode::SUCCESS)
}
