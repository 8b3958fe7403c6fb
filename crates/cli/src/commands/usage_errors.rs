//! Converts clap errors to one-line usage errors.

use std::ffi::OsString;

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use tenmil_base::Error;

use super::renamed_words::{new_word, removal_reason};

/// Converts `error`, found in the command line `words`, to an error that names the value found and the
/// values accepted.
pub(super) fn usage_error(error: &clap::Error, root: &Command, words: &[OsString]) -> Error {
    let command = innermost_subcommand(root, words);
    let flag = || context_text(error, ContextKind::InvalidArg).map(|arg| argument_name(&arg, root));
    let value = context_text(error, ContextKind::InvalidValue).unwrap_or_default();
    let accepted = context_texts(error, ContextKind::ValidValue);
    let line = match error.kind() {
        ErrorKind::ValueValidation => {
            let source = core::error::Error::source(error).map(ToString::to_string);
            let reason = source.unwrap_or_else(|| format!("`{value}` is not accepted"));
            match flag() {
                Some(flag) if flag.starts_with('-') => format!("{flag}: {reason}"),
                _ => reason,
            }
        }
        ErrorKind::InvalidValue if value.is_empty() => {
            let expected = join_alternatives(&accepted).unwrap_or_else(|| "one after it".into());
            format!("{}: the value is missing, expected {expected}", flag().unwrap_or_default())
        }
        ErrorKind::InvalidValue => {
            let expected = join_alternatives(&accepted).unwrap_or_else(|| "another".into());
            let flag = flag().unwrap_or_default();
            match removal_reason(command.get_name(), &flag, Some(&value)) {
                Some(reason) => {
                    format!("{flag} {value} was removed: {reason}, expected {expected}")
                }
                None => format!("{flag} {value}: expected {expected}"),
            }
        }
        ErrorKind::UnknownArgument => {
            let found = context_text(error, ContextKind::InvalidArg).unwrap_or_default();
            let innermost = command.get_name();
            renamed_word_error(innermost, &found)
                .or_else(|| removed_option_error(innermost, &found))
                .unwrap_or_else(|| unknown_argument_error(error))
        }
        ErrorKind::InvalidSubcommand => {
            let found = context_text(error, ContextKind::InvalidSubcommand).unwrap_or_default();
            let unknown =
                || format!("no command `{found}`, expected {}", subcommand_names(command));
            let innermost = command.get_name();
            renamed_word_error(innermost, &found)
                .or_else(|| removed_option_error(innermost, &found))
                .unwrap_or_else(unknown)
        }
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            format!("no command is given, expected {}", subcommand_names(command))
        }
        ErrorKind::MissingRequiredArgument => {
            let missing = context_texts(error, ContextKind::InvalidArg).join(" and ");
            format!("{missing} is missing, expected as shown by --help")
        }
        ErrorKind::ArgumentConflict => {
            let other = context_texts(error, ContextKind::PriorArg);
            let other: Vec<String> = other.iter().map(|arg| argument_name(arg, root)).collect();
            let flag = flag().unwrap_or_default();
            match other.iter().find(|other| **other != flag) {
                Some(other) => format!("{flag} and {other} are both given, expected one of them"),
                None => format!("{flag} is given twice, expected once"),
            }
        }
        _ => error.to_string().lines().next().unwrap_or_default().replace("error: ", ""),
    };
    Error::usage(line)
}

/// Error for a word of version 0.1 that has a new name.
fn renamed_word_error(command: &str, found: &str) -> Option<String> {
    let old = found.split('=').next().unwrap_or(found);
    new_word(command, old).map(|new| format!("`{old}` is now `{new}`"))
}

/// Error for an option or a command of version 0.1 that was removed.
fn removed_option_error(command: &str, found: &str) -> Option<String> {
    let old = found.split('=').next().unwrap_or(found);
    let reason = removal_reason(command, old, None)?;
    Some(format!("`{old}` was removed: {reason}, expected it to be left out"))
}

fn unknown_argument_error(error: &clap::Error) -> String {
    let found = context_text(error, ContextKind::InvalidArg).unwrap_or_default();
    let what = if found.starts_with('-') { "flag" } else { "argument" };
    match context_text(error, ContextKind::SuggestedArg) {
        Some(like) => format!("no {what} `{found}`, expected perhaps `{like}`"),
        None => format!("no {what} `{found}`, expected one of those shown by --help"),
    }
}

/// The innermost subcommand that was parsed before the error.
fn innermost_subcommand<'a>(root: &'a Command, words: &[OsString]) -> &'a Command {
    let words = words.iter().skip(1).map_while(|word| word.to_str());
    let mut command = root;
    for word in words {
        // The words after `help` name commands of the one before it.
        let inner = command.find_subcommand(word).filter(|inner| inner.get_name() != "help");
        let Some(inner) = inner else { break };
        command = inner;
    }
    command
}

/// The short name of a flag if it has one, otherwise its long name.
fn argument_name(argument: &str, root: &Command) -> String {
    let name = argument.split([' ', '=', '[']).next().unwrap_or(argument);
    let all = root.get_subcommands().flat_map(Command::get_arguments);
    let letter = all
        .filter(|arg| arg.get_long().is_some_and(|long| name.strip_prefix("--") == Some(long)))
        .find_map(clap::Arg::get_short);
    letter.map_or_else(|| name.to_owned(), |letter| format!("-{letter}"))
}

fn subcommand_names(command: &Command) -> String {
    let is_shown = |sub: &&Command| !sub.is_hide_set() && sub.get_name() != "help";
    let shown = command.get_subcommands().filter(is_shown);
    let names: Vec<String> = shown.map(|sub| sub.get_name().to_owned()).collect();
    join_alternatives(&names).unwrap_or_default()
}

/// `a, b or c`.
fn join_alternatives(names: &[String]) -> Option<String> {
    let (last, rest) = names.split_last()?;
    Some(if rest.is_empty() { last.clone() } else { format!("{} or {last}", rest.join(", ")) })
}

fn context_text(error: &clap::Error, kind: ContextKind) -> Option<String> {
    context_texts(error, kind).into_iter().next()
}

fn context_texts(error: &clap::Error, kind: ContextKind) -> Vec<String> {
    match error.get(kind) {
        Some(ContextValue::String(text)) => vec![text.clone()],
        Some(ContextValue::Strings(texts)) => texts.clone(),
        _ => Vec::new(),
    }
}
