//! `tenmil get`.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use control::{TABLE, Verb, document, show, words};

use super::running::{PATIENCE, Whom, connect, refused};
use super::write_out;
use crate::Refused;

/// Ask a running tenmil process; without a name, list what can be asked.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct GetArguments {
    /// What to ask for
    #[arg(value_name = "NAME")]
    name: Option<String>,

    /// What to ask about, such as name=poller-0
    #[arg(value_name = "NAME=VALUE", requires = "name")]
    parameters: Vec<String>,

    #[command(flatten)]
    whom: Whom,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Write the documentation of everything that can be asked and set, and ask nobody
    #[arg(long, conflicts_with_all = ["name", "pid", "json"])]
    markdown: bool,
}

const EXAMPLES: &str = "\
Examples:
  tenmil get                        what can be asked
  tenmil get process                what the process has used
  tenmil get environment --json     for programs

docs/control.md describes every method.";

/// Asks and prints.
pub(super) fn run(arguments: &GetArguments, out: &mut dyn Write) -> Result<ExitCode, Refused> {
    let text = match &arguments.name {
        _ if arguments.markdown => document(&TABLE),
        None => contents(arguments.json),
        Some(name) => ask(Verb::Get, name, &arguments.parameters, arguments.whom, arguments.json)?,
    };
    write_out(out, &text)?;
    Ok(ExitCode::SUCCESS)
}

/// Calls a method of one of the two verbs that answer once, and gives what is to be printed. What
/// is wrong with the command line is said before anybody is asked.
pub(super) fn ask(
    verb: Verb,
    name: &str,
    parameters: &[String],
    whom: Whom,
    json: bool,
) -> Result<String, Refused> {
    let method = TABLE.find_typed(verb, name).map_err(refused)?;
    let parameters = words(method, parameters).map_err(refused)?;
    let mut client = connect(whom)?;
    let answer = client.call(&method.wire_name(), parameters, PATIENCE).map_err(refused)?;
    Ok(if json { format!("{answer:#}\n") } else { show(&method.answer, &answer) })
}

/// What there is to get, set and follow. No process is needed to know it.
fn contents(json: bool) -> String {
    if json {
        return format!("{:#}\n", control::schema(&TABLE));
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
        assert!(text.contains("  tenmil get process          Tell what the process is"), "{text}");
        let schema: serde_json::Value = serde_json::from_str(&contents(true)).unwrap();
        assert_eq!(schema["methods"]["process"]["verb"], "get");
    }
}
