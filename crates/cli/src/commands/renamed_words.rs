//! Commands and options of version 0.1 that were renamed or removed, for the error message of an old one.

/// A command or an option that was renamed in version 0.2.
struct RenamedWord {
    /// Innermost command that it belongs to; `tenmil` for a command of the program itself.
    command: &'static str,
    old: &'static str,
    new: &'static str,
}

const fn renamed_word(command: &'static str, old: &'static str, new: &'static str) -> RenamedWord {
    RenamedWord { command, old, new }
}

const RENAMED: [RenamedWord; 22] = [
    renamed_word("tenmil", "store", "pool"),
    renamed_word("tenmil", "policy", "timeouts"),
    renamed_word("tenmil", "evidence", "reproduce"),
    renamed_word("volume", "revert", "rollback"),
    renamed_word("decouple", "--rate", "--limit-bytes"),
    renamed_word("inflate", "--rate", "--limit-bytes"),
    renamed_word("scrub", "--rate", "--limit-bytes"),
    renamed_word("perf", "--read-share", "--rwmixread"),
    renamed_word("perf", "--bs-mix", "--bssplit"),
    renamed_word("perf", "--ceiling", "--baseline"),
    renamed_word("serve", "--host", "--allowed-host"),
    renamed_word("serve", "--state", "--state-dir"),
    renamed_word("serve", "--memory", "--buffer-memory"),
    renamed_word("serve", "--connections", "--max-connections"),
    renamed_word("serve", "--name", "--export-name"),
    renamed_word("serve", "--with-parent", "--exit-with-parent"),
    renamed_word("proxy", "--there", "--to-server"),
    renamed_word("proxy", "--back", "--to-client"),
    renamed_word("proxy", "--room", "--buffer"),
    renamed_word("proxy", "--split", "--fragment"),
    renamed_word("create", "--unit", "--cluster-size"),
    renamed_word("clone", "--unit", "--cluster-size"),
];

/// The new word for `old`, an option or a subcommand of `command`.
pub(super) fn new_word(command: &str, old: &str) -> Option<&'static str> {
    let old = old.split('=').next().unwrap_or(old);
    RENAMED.iter().find(|word| word.command == command && word.old == old).map(|word| word.new)
}

/// An option, one value of an option, or a command of the program `tenmil`, that was removed in version 0.2.
struct RemovedOption {
    command: &'static str,
    option: &'static str,
    /// The removed value; `None` if the option accepts nothing anymore.
    value: Option<&'static str>,
    reason: &'static str,
}

const REMOVED: [RemovedOption; 4] = [
    RemovedOption {
        command: "tenmil",
        option: "sim",
        value: None,
        reason: "`cargo xtask sim` runs the simulators from the sources",
    },
    RemovedOption {
        command: "perf",
        option: "--completion-copy",
        value: None,
        reason: "copying completions by the cache line reached 0.87 of the default's IOPS",
    },
    RemovedOption {
        command: "perf",
        option: "--prefetch",
        value: None,
        reason: "prefetching reached 0.67 to 0.91 of the default's IOPS",
    },
    RemovedOption {
        command: "perf",
        option: "--command-store",
        value: Some("avx512"),
        reason: "AVX-512 stores reached 0.71 of the IOPS of plain stores",
    },
];

/// Why `option` of `command` was removed, or its value `value`.
pub(super) fn removal_reason(
    command: &str,
    option: &str,
    value: Option<&str>,
) -> Option<&'static str> {
    let mut removed = REMOVED.iter().filter(|it| it.command == command && it.option == option);
    removed.find(|it| it.value == value).map(|it| it.reason)
}

#[cfg(test)]
mod tests {
    use super::super::clap_command;
    use super::{REMOVED, RENAMED, new_word, removal_reason};

    /// The commands `name`, wherever they are.
    fn commands_of_name<'a>(command: &'a clap::Command, name: &str) -> Vec<&'a clap::Command> {
        let inner = command.get_subcommands().flat_map(|inner| commands_of_name(inner, name));
        (command.get_name() == name).then_some(command).into_iter().chain(inner).collect()
    }

    fn is_accepted(command: &clap::Command, word: &str) -> bool {
        match word.strip_prefix("--") {
            Some(long) => command.get_arguments().any(|it| it.get_long() == Some(long)),
            None => command.find_subcommand(word).is_some(),
        }
    }

    #[test]
    fn every_new_word_is_accepted_and_no_old_one() {
        let root = clap_command();
        for word in &RENAMED {
            let has = |name| {
                commands_of_name(&root, word.command).into_iter().any(|it| is_accepted(it, name))
            };
            assert!(has(word.new), "{} {}", word.command, word.new);
            assert!(!has(word.old), "{} {}", word.command, word.old);
        }
    }

    #[test]
    fn no_removed_option_is_accepted() {
        let root = clap_command();
        for it in &REMOVED {
            let has = commands_of_name(&root, it.command)
                .into_iter()
                .any(|command| is_accepted(command, it.option));
            assert_eq!(has, it.value.is_some(), "{}", it.option);
        }
        assert_eq!(removal_reason("serve", "--prefetch", None), None);
        assert_eq!(removal_reason("perf", "--command-store", Some("sse2")), None);
    }

    #[test]
    fn option_with_value_is_found_by_its_name() {
        assert_eq!(new_word("perf", "--ceiling=tcp"), Some("--baseline"));
        assert_eq!(new_word("serve", "--ceiling"), None);
    }
}
