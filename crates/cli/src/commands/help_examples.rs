//! Passes the examples of a command's help on to its subcommands.

#[cfg(test)]
mod shell_examples;

use clap::Command;

/// Gives each subcommand without examples of its own those of its parent that call it.
pub(super) fn inherit_examples(command: Command) -> Command {
    let name = command.get_name().to_owned();
    inherit_from_parent(command, &name)
}

fn inherit_from_parent(command: Command, name: &str) -> Command {
    let all = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    command.mut_subcommands(|inner| {
        let name = format!("{name} {}", inner.get_name());
        let own = inner.get_after_help().is_some();
        let shown = if own { String::new() } else { examples_that_call(&all, &name) };
        let inner = if shown.is_empty() { inner } else { inner.after_help(shown) };
        inherit_from_parent(inner, &name)
    })
}

/// The examples that call a command, under one heading.
fn examples_that_call(all: &str, name: &str) -> String {
    let mut shown: Vec<&str> = Vec::new();
    let mut is_shown = false;
    for line in all.lines().skip(1) {
        let continues = line.starts_with("   ");
        is_shown = if continues { is_shown } else { is_call_of(line, name) };
        if is_shown {
            shown.push(line);
        }
    }
    match shown.len() {
        0 => String::new(),
        1 => format!("Example:\n{}", shown[0]),
        _ => format!("Examples:\n{}", shown.join("\n")),
    }
}

fn is_call_of(line: &str, name: &str) -> bool {
    line.split(name).skip(1).any(|rest| rest.is_empty() || rest.starts_with(' '))
}

#[cfg(test)]
mod tests {
    use clap::Command;

    use super::inherit_examples;

    #[test]
    fn example_is_shown_for_the_subcommand_it_calls() {
        const ALL: &str =
            "Examples:\n  x make a\n  x send a |\n      x take b\n  x maker\n  y && x make";
        let inner = ["make", "send", "take"].map(Command::new);
        let command = inherit_examples(Command::new("x").after_help(ALL).subcommands(inner));
        let help = |name: &str| {
            let inner = command.find_subcommand(name).unwrap();
            inner.get_after_help().map(ToString::to_string)
        };
        assert_eq!(help("make").unwrap(), "Examples:\n  x make a\n  y && x make");
        assert_eq!(help("send").unwrap(), "Examples:\n  x send a |\n      x take b");
        assert_eq!(help("take"), None, "the line begins with another");
    }
}
