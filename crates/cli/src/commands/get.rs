//! `tenmil get`: calls a `get` method of a running process.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use tenmil_rpc::{MethodKind, TABLE, format_result, parse_command_line_words, reference_markdown};

use super::rpc_endpoint::{ProcessSelector, RESPONSE_TIMEOUT, command_error, connect_to_process};
use super::write_stdout;
use tenmil_base::Error;

/// Query a running tenmil process; without a name, list the methods.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct GetArguments {
    /// Method to call
    #[arg(value_name = "NAME")]
    name: Option<String>,

    /// Parameters of the method, such as name=poller-0
    #[arg(value_name = "NAME=VALUE", requires = "name")]
    parameters: Vec<String>,

    #[command(flatten)]
    process: ProcessSelector,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Print the reference of all methods and events as Markdown; contacts no process
    #[arg(long, conflicts_with_all = ["name", "pid", "instance", "control", "json"])]
    markdown: bool,
}

const EXAMPLES: &str = "\
Examples:
  tenmil get                        the queries
  tenmil get process                what the process has used
  tenmil get environment --json     for programs
  tenmil get process --instance db  a process that was started with --instance db
  tenmil get process --control /run/tenmil/control

`tenmil get --markdown` prints a reference of all methods and events; docs/operator/api.md describes the
same as an HTTP API, for curl and other programs.";

/// Calls the method and prints its result.
pub(super) fn run_get(arguments: &GetArguments, out: &mut dyn Write) -> Result<ExitCode, Error> {
    let text = match &arguments.name {
        _ if arguments.markdown => reference_markdown(&TABLE),
        None => method_list_text(arguments.json),
        Some(name) => call_method(
            MethodKind::Get,
            name,
            &arguments.parameters,
            &arguments.process,
            arguments.json,
        )?,
    };
    write_stdout(out, &text)?;
    Ok(ExitCode::SUCCESS)
}

/// Calls a `get` or `set` method and returns the text to print. The arguments are validated before a
/// process is contacted.
pub(super) fn call_method(
    verb: MethodKind,
    name: &str,
    parameters: &[String],
    process: &ProcessSelector,
    json: bool,
) -> Result<String, Error> {
    let method = TABLE.find_by_command_line_name(verb, name).map_err(command_error)?;
    let parameters = parse_command_line_words(method, parameters).map_err(command_error)?;
    let mut client = connect_to_process(process)?;
    let answer = client
        .call_method(&method.request_name(), parameters, RESPONSE_TIMEOUT)
        .map_err(command_error)?;
    Ok(if json { format!("{answer:#}\n") } else { format_result(&method.answer, &answer) })
}

/// List of all methods and events; needs no running process.
fn method_list_text(json: bool) -> String {
    if json {
        return format!("{:#}\n", tenmil_rpc::table_schema(&TABLE));
    }
    let row = |(typed, help): (String, &str)| format!("  tenmil {typed:<20} {help}\n");
    TABLE.methods().map(|method| row((method.command_line_name(), method.help))).collect()
}

#[cfg(test)]
mod tests {
    use super::method_list_text;

    #[test]
    fn methods_are_listed_as_text_and_json() {
        let text = method_list_text(false);
        assert!(text.contains("  tenmil get process          Show the process"), "{text}");
        let schema: serde_json::Value = serde_json::from_str(&method_list_text(true)).unwrap();
        assert_eq!(schema["methods"]["process"]["verb"], "get");
    }
}
