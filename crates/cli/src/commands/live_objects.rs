//! `tenmil subsystem|namespace|host|listener create|delete|list|set`: objects of a running target.
//!
//! The commands follow from the rows of the method table: required parameters are arguments in their
//! order, and the others options.

use std::io::Write;
use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use serde_json::{Map, Value};
use tenmil_base::{Error, Span};
use tenmil_rpc::{
    Arguments, Method, MethodKind, ParamDefault, ParamType, Parameter, TABLE, format_result,
};

use super::rpc_endpoint::{ProcessSelector, command_error, connect_to_process};
use super::write_stdout;

/// Object with commands of its own.
struct ObjectCommands {
    name: &'static str,
    /// Method that lists the objects.
    list: &'static str,
    examples: &'static str,
}

const OBJECTS: [ObjectCommands; 5] = [
    ObjectCommands {
        name: "subsystem",
        list: "subsystems",
        examples: "\
Examples:
  tenmil subsystem create nqn.2026-01.org.example:disks
  tenmil subsystem create nqn.2026-01.org.example:lab --allow-any-host
  tenmil subsystem set nqn.2026-01.org.example:disks --listeners 192.0.2.1:4420
  tenmil subsystem set nqn.2026-01.org.example:disks --unset listeners
  tenmil subsystem delete nqn.2026-01.org.example:disks
  tenmil subsystem list --json",
    },
    ObjectCommands {
        name: "namespace",
        list: "namespaces",
        examples: "\
Examples:
  tenmil namespace create nqn.2026-01.org.example:disks ram:1g
  tenmil namespace create nqn.2026-01.org.example:disks /dev/sdb --nsid 7 --read-only
  tenmil namespace set nqn.2026-01.org.example:disks 7 --read-only=false
  tenmil namespace set nqn.2026-01.org.example:disks 7 --allowed-hosts nqn.2026-01.org.example:db
  tenmil namespace delete nqn.2026-01.org.example:disks 7
  tenmil namespace list --subsystem nqn.2026-01.org.example:disks",
    },
    ObjectCommands {
        name: "host",
        list: "hosts",
        examples: "\
Examples:
  tenmil host create nqn.2026-01.org.example:disks nqn.2026-01.org.example:db
  tenmil host create nqn.2026-01.org.example:disks nqn.2026-01.org.example:db --dhchap db
  tenmil host set nqn.2026-01.org.example:disks nqn.2026-01.org.example:db --read-only
  tenmil host set nqn.2026-01.org.example:disks nqn.2026-01.org.example:db --unset dhchap
  tenmil host delete nqn.2026-01.org.example:disks nqn.2026-01.org.example:db
  tenmil host list",
    },
    ObjectCommands {
        name: "listener",
        list: "listeners",
        examples: "\
Examples:
  tenmil listener create 192.0.2.1:4420 --tls required
  tenmil listener set 192.0.2.1:4420 --allowed-networks 192.0.2.0/24
  tenmil listener delete 192.0.2.1:4420
  tenmil listener list",
    },
    ObjectCommands {
        name: "export",
        list: "exports",
        examples: "\
Examples:
  tenmil export create images ram:1g nbd:/run/images.sock
  tenmil export create images /dev/sdb nbd://127.0.0.1:10809 nbds://192.0.2.1:10809 --read-only
  tenmil export set --name images --size-bytes 21474836480
  tenmil export delete images
  tenmil export list",
    },
];

/// Arguments of the commands of the object at an index of [`OBJECTS`].
#[derive(Debug)]
pub(super) struct ObjectArguments<const OBJECT: usize> {
    method: &'static Method,
    parameters: Map<String, Value>,
    process: ProcessSelector,
    json: bool,
}

pub(super) type SubsystemArguments = ObjectArguments<0>;
pub(super) type NamespaceArguments = ObjectArguments<1>;
pub(super) type HostArguments = ObjectArguments<2>;
pub(super) type ListenerArguments = ObjectArguments<3>;
pub(super) type ExportArguments = ObjectArguments<4>;

/// Time limit for a change: devices are opened meanwhile.
pub(super) const CHANGE_TIMEOUT: Span = Span::from_secs(60);

impl<const OBJECT: usize> ObjectArguments<OBJECT> {
    /// Calls the method and prints its result.
    pub(super) fn run(&self, out: &mut dyn Write) -> Result<ExitCode, Error> {
        let Self { method, parameters, process, json } = self;
        let mut client = connect_to_process(process)?;
        let answer = client
            .call_method(&method.request_name(), parameters.clone(), CHANGE_TIMEOUT)
            .map_err(command_error)?;
        if *json {
            write_stdout(out, &format!("{answer:#}\n"))?;
        } else if method.verb == MethodKind::Get || answer["changes"].is_null() {
            write_stdout(out, &format_result(&method.answer, &answer))?;
        } else {
            write_stdout(out, &change_text(&answer))?;
        }
        check_whole(&answer)
    }
}

/// The changes of an answer as lines, and where they were saved.
pub(super) fn change_text(answer: &Value) -> String {
    let lines = |key: &str| {
        let list = answer[key].as_array().into_iter().flatten();
        list.filter_map(Value::as_str).map(|line| format!("{line}\n")).collect::<String>()
    };
    let saved = match answer["saved_to"].as_str() {
        Some(path) => format!("saved to {path}\n"),
        None => "in memory only: the process has no configuration file\n".to_owned(),
    };
    let changes = lines("changes");
    if changes.is_empty() {
        format!("nothing has changed for hosts\n{saved}")
    } else {
        changes + &saved
    }
}

/// Success, unless a part of a change could not be made.
pub(super) fn check_whole(answer: &Value) -> Result<ExitCode, Error> {
    let failed = answer["failed"].as_array().into_iter().flatten();
    let failed: Vec<&str> = failed.filter_map(Value::as_str).collect();
    match failed.as_slice() {
        [] => Ok(ExitCode::SUCCESS),
        failed => Err(Error::environment(format!("apply: {}", failed.join("; ")))),
    }
}

impl<const OBJECT: usize> Args for ObjectArguments<OBJECT> {
    fn augment_args(command: Command) -> Command {
        let object = &OBJECTS[OBJECT];
        let command = command
            .subcommand_required(true)
            .arg_required_else_help(true)
            .after_help(object.examples);
        command.subcommands(methods_of(object).map(|(name, method)| {
            let subcommand = method.parameters.iter().fold(Command::new(name), add_parameter);
            let json = Arg::new("json").long("json").help("Print JSON").action(ArgAction::SetTrue);
            // After the options of the selector, whose description would replace it.
            ProcessSelector::augment_args(subcommand).arg(json).about(method.help)
        }))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<const OBJECT: usize> FromArgMatches for ObjectArguments<OBJECT> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let object = &OBJECTS[OBJECT];
        let missing = || clap::Error::new(clap::error::ErrorKind::MissingSubcommand);
        let (name, matches) = matches.subcommand().ok_or_else(missing)?;
        let (_, method) = methods_of(object).find(|(it, _)| *it == name).ok_or_else(missing)?;
        let refuse = |text: String| clap::Error::raw(clap::error::ErrorKind::ValueValidation, text);
        let mut parameters = Map::new();
        for parameter in method.parameters {
            let Ok(Some(values)) = matches.try_get_many::<String>(parameter.name) else { continue };
            let value = parameter_value(parameter, values)
                .map_err(|why| refuse(format!("{}: {} {why}\n", object.name, parameter.name)))?;
            parameters.insert(parameter.name.to_owned(), value);
        }
        Arguments::validate(method, &parameters).map_err(|why| refuse(format!("{why}\n")))?;
        let process = ProcessSelector::from_arg_matches(matches)?;
        Ok(Self { method, parameters, process, json: matches.get_flag("json") })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Methods of an object with the names of their commands.
fn methods_of(
    object: &'static ObjectCommands,
) -> impl Iterator<Item = (&'static str, &'static Method)> {
    let command = |method: &'static Method| match method.verb {
        MethodKind::Get if method.name == object.list => Some("list"),
        MethodKind::Create | MethodKind::Set | MethodKind::Delete if method.name == object.name => {
            Some(method.verb.name())
        }
        _ => None,
    };
    TABLE.methods().filter_map(move |method| Some((command(method)?, method)))
}

/// Adds the argument or option of a parameter.
fn add_parameter(command: Command, parameter: &Parameter) -> Command {
    let upper: String = parameter.name.to_uppercase();
    let argument = Arg::new(parameter.name).help(sentence(parameter.help)).value_name(upper);
    if parameter.need == ParamDefault::Required {
        let argument = argument.required(true);
        return command.arg(match parameter.kind {
            ParamType::Texts { .. } => argument.num_args(1..),
            _ => argument,
        });
    }
    let argument = argument.long(parameter.name.replace('_', "-"));
    command.arg(match parameter.kind {
        ParamType::Flag => argument
            .value_name("BOOL")
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value("true"),
        ParamType::Texts { .. } => argument
            .action(ArgAction::Append)
            .help(format!("{}; may be repeated", sentence(parameter.help))),
        ParamType::OneOf(words) => argument.value_name("WORD").help(format!(
            "{}: {}",
            sentence(parameter.help),
            words.join(", ")
        )),
        _ => argument,
    })
}

/// The phrase as a sentence of the help.
fn sentence(phrase: &str) -> String {
    let mut letters = phrase.chars();
    let first = letters.next().map(|first| first.to_uppercase().collect::<String>());
    first.unwrap_or_default() + letters.as_str()
}

fn parameter_value<'a>(
    parameter: &Parameter,
    values: impl Iterator<Item = &'a String>,
) -> Result<Value, String> {
    let parsed = values.map(|text| {
        // Options are written with hyphens, parameters with underscores.
        let text = if parameter.name == "unset" { text.replace('-', "_") } else { text.clone() };
        parameter.kind.parse_text(&text)
    });
    let parsed: Vec<Value> = parsed.collect::<Result<_, _>>()?;
    Ok(match (parameter.kind, parsed.as_slice()) {
        (ParamType::Texts { .. }, _) => parsed.into(),
        (_, [.., last]) => last.clone(),
        (_, []) => Value::Null,
    })
}

#[cfg(test)]
mod tests {
    use clap::{Args, Command};
    use serde_json::{Value, json};

    use super::{HostArguments, NamespaceArguments, OBJECTS, change_text, methods_of};

    fn parse<A: Args>(line: &str) -> Result<A, String> {
        let command = A::augment_args(Command::new("object"));
        let matches = command.try_get_matches_from(line.split(' '));
        let parsed = matches.and_then(|matches| A::from_arg_matches(&matches));
        parsed.map_err(|error| error.to_string())
    }

    #[test]
    fn each_command_has_the_description_of_its_method() {
        let command = NamespaceArguments::augment_args(Command::new("namespace"));
        for (name, method) in methods_of(&OBJECTS[1]) {
            let about = command.find_subcommand(name).and_then(Command::get_about);
            assert_eq!(about.map(ToString::to_string).as_deref(), Some(method.help), "{name}");
        }
    }

    #[test]
    fn required_parameters_are_arguments_and_the_others_options() {
        let line = "object create nqn.2026-01.org.a:b ram:1m --nsid 7 --read-only \
                    --allowed-hosts nqn.2026-01.org.a:c --allowed-hosts nqn.2026-01.org.a:d --pid 9";
        let parsed = parse::<NamespaceArguments>(line).unwrap();
        let expected = json!({
            "subsystem": "nqn.2026-01.org.a:b",
            "uri": "ram:1m",
            "nsid": 7,
            "read_only": true,
            "allowed_hosts": ["nqn.2026-01.org.a:c", "nqn.2026-01.org.a:d"],
        });
        assert_eq!(Value::Object(parsed.parameters), expected);
        assert_eq!(
            (parsed.method.request_name().as_str(), parsed.process.pid),
            ("create_namespace", Some(9))
        );
        let parsed =
            parse::<HostArguments>("object set a b --unset read-only --reservations=false");
        let parsed = Value::Object(parsed.unwrap().parameters);
        assert_eq!(
            (&parsed["unset"], &parsed["reservations"]),
            (&json!(["read_only"]), &json!(false))
        );
        let refused =
            parse::<NamespaceArguments>("object delete nqn.2026-01.org.a:b many").unwrap_err();
        assert!(
            refused.contains("nsid is `many`, expected a whole number from 1 to 1024"),
            "{refused}"
        );
        assert!(parse::<NamespaceArguments>("object delete").is_err());
    }

    #[test]
    fn every_object_has_all_four_commands() {
        for object in &OBJECTS {
            let names: Vec<_> = methods_of(object).map(|(name, _)| name).collect();
            for name in ["list", "create", "set", "delete"] {
                assert_eq!(names.iter().filter(|it| **it == name).count(), 1, "{}", object.name);
            }
        }
    }

    #[test]
    fn change_is_printed_as_lines_with_the_place_where_it_was_saved() {
        let answer = json!({ "changes": ["listens at 127.0.0.1:1"], "saved_to": "/etc/a.toml" });
        assert_eq!(change_text(&answer), "listens at 127.0.0.1:1\nsaved to /etc/a.toml\n");
        assert!(change_text(&json!({ "saved_to": null })).contains("in memory only"));
    }
}
