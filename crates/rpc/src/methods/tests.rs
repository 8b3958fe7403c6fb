//! Consistency checks of every row of the method table.

use std::collections::BTreeSet;

use serde_json::Value;

use super::TABLE;
use crate::arguments::parse_command_line_words;
use crate::event::EventKind;
use crate::json_schema::table_schema;
use crate::method::{CallContext, Method, MethodKind, ParamDefault};
use crate::reference_doc::reference_markdown;
use crate::shell_completion::complete_last_word;
use crate::{Arguments, DeferredReplySlot, ProcessParts};

fn is_valid_name(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_lowercase())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}

fn words_of_line(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

#[test]
fn method_names_are_unique_and_every_definition_is_complete() {
    let names: Vec<String> = TABLE.methods().map(Method::request_name).collect();
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len(), "{names:?}");
    for method in TABLE.methods() {
        let name = method.command_line_name();
        assert!(is_valid_name(method.name), "{name}");
        assert!(
            method.help.starts_with(char::is_uppercase) && !method.help.ends_with('.'),
            "{name}"
        );
        for field in method.answer.declared_fields() {
            assert!(is_valid_name(field.name) && !field.help.is_empty(), "{name}: {}", field.name);
        }
        let mut parameters = BTreeSet::new();
        for parameter in method.parameters {
            assert!(is_valid_name(parameter.name) && !parameter.help.is_empty(), "{name}");
            assert!(parameters.insert(parameter.name), "{name}: {} twice", parameter.name);
            if let ParamDefault::Default(text) = parameter.need {
                assert!(parameter.kind.parse_text(text).is_ok(), "{name}: {}", parameter.name);
            }
        }
    }
    let kinds: Vec<&EventKind> = TABLE.events().collect();
    assert!(
        kinds
            .iter()
            .all(|kind| is_valid_name(&kind.name.replace('-', "_")) && !kind.help.is_empty())
    );
    let names: BTreeSet<_> = kinds.iter().map(|kind| kind.name).collect();
    assert_eq!(names.len(), kinds.len());
}

/// Required parameters in their order and options, as `tenmil NAME create` reads them, as NAME=VALUE.
fn words_of_object_command(method: &Method, words: &[String]) -> Vec<String> {
    let is_required = |need: ParamDefault| need == ParamDefault::Required;
    let mut required = method.parameters.iter().filter(|one| is_required(one.need));
    let (mut words, mut named) = (words.iter(), Vec::new());
    while let Some(word) = words.next() {
        let (name, value) = match word.strip_prefix("--") {
            Some(option) => (option.replace('-', "_"), words.next().unwrap()),
            None => (required.next().unwrap().name.to_owned(), word),
        };
        named.push(format!("{name}={value}"));
    }
    named
}

#[test]
fn example_of_every_method_is_a_command_line_that_calls_it() {
    for method in TABLE.methods() {
        let example = words_of_line(method.example);
        let expected = words_of_line(&format!("tenmil {}", method.command_line_name()));
        assert_eq!(example[..expected.len()], expected, "{}", method.example);
        let rest = &example[expected.len()..];
        let rest = match method.verb {
            MethodKind::Create | MethodKind::Delete => words_of_object_command(method, rest),
            _ => rest.iter().filter(|word| !word.starts_with("--")).cloned().collect(),
        };
        parse_command_line_words(method, &rest)
            .unwrap_or_else(|refusal| panic!("{}: {refusal}", method.example));
    }
}

#[test]
fn read_only_methods_return_their_declared_result_type() {
    let state = ProcessParts::new().with_part(super::ProgramInfo { version: "1.2.3", log: None });
    for method in TABLE.methods().filter(|method| !method.verb.is_change()) {
        // Required parameters have the values of the example.
        let has_to = method.parameters.iter().any(|one| one.need == ParamDefault::Required);
        let given =
            words_of_line(method.example).into_iter().filter(|word| has_to && word.contains('='));
        let given = parse_command_line_words(method, &given.collect::<Vec<_>>()).unwrap();
        let arguments = Arguments::validate(method, &given).unwrap();
        let call = CallContext {
            table: &TABLE,
            state: &state,
            arguments: &arguments,
            later: &DeferredReplySlot::default(),
            passed: &crate::PassedFd::default(),
        };
        match (method.run)(&call) {
            Ok(answer) => assert_eq!(method.answer.check_value(&answer), Ok(()), "{}", method.name),
            Err(refusal) => assert_eq!(refusal.code, crate::ErrorCode::NotFound, "{}", method.name),
        }
    }
}

#[test]
fn process_method_describes_this_process() {
    let state = ProcessParts::new().with_part(super::ProgramInfo { version: "1.2.3", log: None });
    let call = CallContext {
        table: &TABLE,
        state: &state,
        arguments: &Arguments::default(),
        later: &DeferredReplySlot::default(),
        passed: &crate::PassedFd::default(),
    };
    let answer = (TABLE.find("process").unwrap().run)(&call).unwrap();
    assert_eq!(answer["pid"], std::process::id());
    assert_eq!(answer["version"], "1.2.3");
    assert!(answer["descriptors"].as_u64() > Some(2) && answer["threads"].as_u64() > Some(0));
    let refusal =
        (TABLE.find("process").unwrap().run)(&CallContext { state: &ProcessParts::new(), ..call });
    assert_eq!(refusal.unwrap_err().code, crate::ErrorCode::NotFound);
}

#[test]
fn schema_describes_every_method_and_every_parameter() {
    let schema = table_schema(&TABLE);
    for method in TABLE.methods() {
        let described = &schema["methods"][method.request_name()];
        assert_eq!(described["verb"], method.verb.name());
        assert_eq!(described["parameters"]["additionalProperties"], false);
        for parameter in method.parameters {
            let property = &described["parameters"]["properties"][parameter.name];
            assert_eq!(property["description"], parameter.help);
            assert!(property["type"].is_string() || property["oneOf"].is_array());
            let required = described["parameters"]["required"].as_array().unwrap();
            let is_required = required.contains(&Value::from(parameter.name));
            assert_eq!(is_required, parameter.need == ParamDefault::Required);
        }
        assert!(described["answer"]["type"].is_string());
    }
}

#[test]
fn reference_describes_every_method_parameter_result_and_event() {
    let text = reference_markdown(&TABLE);
    for method in TABLE.methods() {
        let heading = format!("\n### {}\n", method.command_line_name());
        let (_, section) = text.split_once(&heading).unwrap_or_else(|| panic!("no {heading}"));
        let section = section.split("\n## ").next().unwrap().split("\n### ").next().unwrap();
        assert!(section.contains(method.example) && section.contains(method.help), "{section}");
        let parameters = method.parameters.iter().map(|one| (one.name, one.help));
        let fields = method.answer.declared_fields().iter().map(|one| (one.name, one.help));
        for (name, help) in parameters.chain(fields) {
            let is_row =
                |line: &str| line.starts_with(&format!("| `{name}` |")) && line.contains(help);
            assert!(section.lines().any(is_row), "{heading}{name} is not described");
        }
    }
    for kind in TABLE.events() {
        assert!(text.contains(&format!("| `{}` | {} |", kind.name, kind.help)), "{}", kind.name);
    }
}

#[test]
fn method_names_are_completed() {
    let words = |words: &[&str]| -> Vec<String> { words.iter().map(|&word| word.into()).collect() };
    let all = complete_last_word(&TABLE, MethodKind::Get, &words(&[""]));
    assert!(all.contains(&"process".to_owned()) && all.contains(&"schema".to_owned()));
    assert_eq!(complete_last_word(&TABLE, MethodKind::Get, &words(&["env"])), ["environment"]);
    assert_eq!(complete_last_word(&TABLE, MethodKind::Get, &words(&["x"])), [""; 0]);
    assert_eq!(complete_last_word(&TABLE, MethodKind::Get, &words(&["process", ""])), [""; 0]);
    assert_eq!(complete_last_word(&TABLE, MethodKind::Get, &words(&["nothing", ""])), [""; 0]);
    assert_eq!(complete_last_word(&TABLE, MethodKind::Get, &[]), [""; 0]);
}
