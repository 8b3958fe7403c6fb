//! Completion of command lines.

use crate::method::{Method, MethodKind, MethodRegistry};
use crate::param_type::ParamType;

/// Completions of the last of `words`, which follow the verb and may end with an empty word: first
/// a method name, then parameters not yet given, then their values.
pub fn complete_last_word(
    table: &MethodRegistry,
    verb: MethodKind,
    words: &[String],
) -> Vec<String> {
    let Some((last, before)) = words.split_last() else { return Vec::new() };
    let Some((name, given)) = before.split_first() else {
        let names = table.methods().filter(|method| method.verb == verb);
        return words_with_prefix(last, names.map(|method| method.name.to_owned()));
    };
    match table.find_by_command_line_name(verb, name) {
        Ok(method) => complete_parameter(method, given, last),
        Err(_) => Vec::new(),
    }
}

fn complete_parameter(method: &Method, given: &[String], last: &str) -> Vec<String> {
    if let Some((name, _)) = last.split_once('=') {
        let parameter = method.parameters.iter().find(|parameter| parameter.name == name);
        let choices = parameter.map_or(&[][..], |parameter| parameter.kind.enumerated_words());
        return words_with_prefix(last, choices.iter().map(|choice| format!("{name}={choice}")));
    }
    let is_given = |name: &str| {
        given.iter().any(|word| word.split_once('=').is_some_and(|(given, _)| given == name))
    };
    let may_repeat = |kind| matches!(kind, ParamType::Texts { .. });
    let free = method
        .parameters
        .iter()
        .filter(|parameter| may_repeat(parameter.kind) || !is_given(parameter.name));
    words_with_prefix(last, free.map(|parameter| format!("{}=", parameter.name)))
}

fn words_with_prefix(prefix: &str, words: impl Iterator<Item = String>) -> Vec<String> {
    words.filter(|word| word.starts_with(prefix)).collect()
}
