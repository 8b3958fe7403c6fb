//! `tenmil get`: calls a `get` method of a running process.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use tenmil_rpc::{MethodKind, TABLE, document, show, words};

use super::rpc_endpoint::{ProcessSelector, RESPONSE_TIMEOUT, connect, refused};
use super::write_out;
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
    #[arg(long, conflicts_with_all = ["name", "pid", "json"])]
    markdown: bool,
}

const EXAMPLES: &str = "\
Examples:
  tenmil get                        the queries
  tenmil get process                what the process has used
  tenmil get environment --json     for programs

`tenmil get --markdown` prints a reference of all methods and events.";

/// Calls the method and prints its result.
pub(super) fn run(arguments: &GetArguments, out: &mut dyn Write) -> Result<ExitCode, Error> {
    let text = match &arguments.name {
        _ if arguments.markdown => document(&TABLE),
        None => contents(arguments.json),
        Some(name) => call_method(
            MethodKind::Get,
            name,
            &arguments.parameters,
            arguments.process,
            arguments.json,
        )?,
    };
    write_out(out, &text)?;
    Ok(ExitCode::SUCCESS)
}

/// Calls a `get` or `set` method and returns the text to print. The arguments are validated before a
/// process is contacted.
pub(super) fn call_method(
    verb: MethodKind,
    name: &str,
    parameters: &[String],
    process: ProcessSelector,
    json: bool,
) -> Result<String, Error> {
    let method = TABLE.find_typed(verb, name).map_err(refused)?;
    let parameters = words(method, parameters).map_err(refused)?;
    let mut client = connect(process)?;
    let answer = client.call(&method.wire_name(), parameters, RESPONSE_TIMEOUT).map_err(refused)?;
    Ok(if json { format!("{answer:#}\n") } else { show(&method.answer, &answer) })
}

/// List of all methods and events; needs no running process.
fn contents(json: bool) -> String {
    if json {
        return format!("{:#}\n", tenmil_rpc::schema(&TABLE));
    }
    let row = |(typed, help): (String, &str)| format!("  tenmil {typed:<20} {help}\n");
    TABLE.methods().map(|method| row((method.typed_name(), method.help))).collect()
}

#[cfg(test)]
mod tests {
    use super::contents;

    #[test]
    fn what_can_be_asked_is_listed_for_people_and_for_programs() {
        let text = contents(false);
        assert!(text.contains("  tenmil get process          Show the process"), "{text}");
        let schema: serde_json::Value = serde_json::from_str(&contents(true)).unwrap();
        assert_eq!(schema["methods"]["process"]["verb"], "get");
    }
}
