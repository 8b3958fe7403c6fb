//! Commands and options of version 0.1 under their new names, for the error message of an old one.

/// A command or an option that was renamed in version 0.2.
struct RenamedWord {
    /// Innermost command that it belongs to; `tenmil` for a command of the program itself.
    command: &'static str,
    old: &'static str,
    new: &'static str,
}

const fn renamed(command: &'static str, old: &'static str, new: &'static str) -> RenamedWord {
    RenamedWord { command, old, new }
}

const RENAMED: [RenamedWord; 21] = [
    renamed("tenmil", "store", "pool"),
    renamed("tenmil", "policy", "timeouts"),
    renamed("tenmil", "evidence", "reproduce"),
    renamed("volume", "revert", "rollback"),
    renamed("decouple", "--rate", "--limit-bytes"),
    renamed("inflate", "--rate", "--limit-bytes"),
    renamed("scrub", "--rate", "--limit-bytes"),
    renamed("perf", "--read-share", "--rwmixread"),
    renamed("perf", "--bs-mix", "--bssplit"),
    renamed("perf", "--ceiling", "--baseline"),
    renamed("serve", "--host", "--allowed-host"),
    renamed("serve", "--state", "--state-dir"),
    renamed("serve", "--memory", "--buffer-memory"),
    renamed("serve", "--connections", "--max-connections"),
    renamed("serve", "--name", "--export-name"),
    renamed("serve", "--with-parent", "--exit-with-parent"),
    renamed("proxy", "--there", "--to-server"),
    renamed("proxy", "--back", "--to-client"),
    renamed("proxy", "--room", "--buffer"),
    renamed("proxy", "--split", "--fragment"),
    renamed("sim", "--canary", "--injected-bugs"),
];

/// The new word for `old`, an option or a subcommand of `command`.
pub(super) fn new_word(command: &str, old: &str) -> Option<&'static str> {
    let old = old.split('=').next().unwrap_or(old);
    RENAMED.iter().find(|word| word.command == command && word.old == old).map(|word| word.new)
}

#[cfg(test)]
mod tests {
    use super::super::grammar;
    use super::{RENAMED, new_word};

    /// The command `name`, wherever it is.
    fn find<'a>(command: &'a clap::Command, name: &str) -> Option<&'a clap::Command> {
        if command.get_name() == name {
            return Some(command);
        }
        command.get_subcommands().find_map(|inner| find(inner, name))
    }

    fn has(command: &clap::Command, word: &str) -> bool {
        match word.strip_prefix("--") {
            Some(long) => command.get_arguments().any(|it| it.get_long() == Some(long)),
            None => command.find_subcommand(word).is_some(),
        }
    }

    #[test]
    fn every_new_word_is_accepted_and_no_old_one() {
        let root = grammar();
        for word in &RENAMED {
            let command = find(&root, word.command).unwrap_or_else(|| panic!("{}", word.command));
            assert!(has(command, word.new), "{} {}", word.command, word.new);
            assert!(!has(command, word.old), "{} {}", word.command, word.old);
        }
    }

    #[test]
    fn option_with_a_value_is_found_by_its_name() {
        assert_eq!(new_word("perf", "--ceiling=tcp"), Some("--baseline"));
        assert_eq!(new_word("serve", "--ceiling"), None);
    }
}
