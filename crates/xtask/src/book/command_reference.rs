//! Reference of all commands, from the program's own help.

use std::path::Path;

/// The reference as Markdown, and the commands and options without a description.
pub(super) fn command_reference(binary: &Path) -> Result<(String, Vec<String>), String> {
    let mut text =
        "# Commands and options\n\nLook up every command of tenmil with all of its options.\n\n\
                    <!-- Generated from `tenmil … --help` by `cargo xtask book`. -->\n"
            .to_owned();
    let mut undescribed = Vec::new();
    // Depth first, in the order of the help.
    let mut waiting = vec![vec!["tenmil".to_owned()]];
    while let Some(command) = waiting.pop() {
        let words: Vec<&str> = command[1..].iter().map(String::as_str).chain(["--help"]).collect();
        let help = super::program_output(binary, &words)?;
        let name = command.join(" ");
        let help = help.trim_end();
        text += &format!("\n## {name}\n\n```text\n{help}\n```\n");
        let missing = undescribed_entries(help);
        undescribed
            .extend(missing.map(|entry| format!("{name} --help: `{entry}` is not described")));
        let inner =
            subcommand_names(help).map(|inner| [&command[..], &[inner.to_owned()]].concat());
        let inner: Vec<_> = inner.collect();
        waiting.extend(inner.into_iter().rev());
    }
    Ok((text, undescribed))
}

/// Lines of the section `heading` of a help text.
fn help_section<'a>(help: &'a str, heading: &str) -> impl Iterator<Item = &'a str> {
    let start = help.lines().skip_while(move |line| *line != heading);
    start.skip(1).take_while(|line| line.is_empty() || line.starts_with(' '))
}

/// Names in the list of subcommands, without `help`.
fn subcommand_names(help: &str) -> impl Iterator<Item = &str> {
    let entries = help_section(help, "Commands:").filter(|line| indentation(line) == 2);
    entries.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help")
}

/// Entries of a help text that nothing describes, neither in their line nor in the next one.
fn undescribed_entries(help: &str) -> impl Iterator<Item = &str> {
    let lines: Vec<&str> = help.lines().collect();
    let entry = |at: usize| {
        let line = lines[at];
        let is_option = line.trim_start().starts_with('-') && indentation(line) <= 6;
        let is_described = line.trim_start().contains("  ")
            || lines.get(at + 1).is_some_and(|next| indentation(next) > 8 && !next.is_empty());
        (is_option && !is_described).then(|| line.trim())
    };
    let examples = lines.iter().position(|line| line.starts_with("Example"));
    (0..examples.unwrap_or(lines.len())).filter_map(entry).collect::<Vec<_>>().into_iter()
}

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELP: &str = "Pools\n\nUsage: tenmil pool [OPTIONS]\n\nCommands:\n  create  Create a pool,\n          \
                        or several\n  help    Print this\n\nOptions:\n      --json\n          Print JSON\n  \
                        -n, --name <NAME>\n      --size <SIZE>  Size\n  -h, --help  Print help\n\nExamples:\n  -x\n";

    #[test]
    fn subcommand_names_are_those_of_the_list() {
        assert_eq!(subcommand_names(HELP).collect::<Vec<_>>(), ["create"]);
    }

    #[test]
    fn option_without_description_is_found() {
        assert_eq!(undescribed_entries(HELP).collect::<Vec<_>>(), ["-n, --name <NAME>"]);
    }
}
