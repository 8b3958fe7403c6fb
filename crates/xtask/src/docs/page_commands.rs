//! Extraction of the commands of a page.

/// Block of commands.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CommandBlock {
    /// Line number of its start.
    pub(super) line: usize,
    pub(super) mark: Option<BlockMark>,
    pub(super) commands: Vec<DocCommand>,
}

/// Annotation in the comment before a block.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BlockMark {
    NotRun(String),
    Needs(Vec<String>),
    Long(String),
}

/// Command, which may span several lines.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct DocCommand {
    pub(super) line: usize,
    pub(super) text: String,
}

/// All `sh` blocks of a page.
pub(super) fn command_blocks(page: &str, text: &str) -> Result<Vec<CommandBlock>, String> {
    let mut blocks: Vec<CommandBlock> = Vec::new();
    let mut mark = None;
    let mut is_inside = false;
    let mut is_other = false;
    for (at, line) in text.lines().enumerate() {
        let number = at + 1;
        if line.starts_with("```") {
            let is_begin = !is_inside && !is_other;
            (is_inside, is_other) = (is_begin && line == "```sh", is_begin && line != "```sh");
            if is_inside {
                blocks.push(CommandBlock { line: number, mark: mark.take(), commands: Vec::new() });
            }
        } else if let Some(block) = blocks.last_mut().filter(|_| is_inside) {
            append_command_line(&mut block.commands, number, line);
        } else if let Some(found) = parse_mark(line).filter(|_| !is_other) {
            mark = Some(found);
        } else if mark.is_some() {
            return Err(format!("{page}:{number}: a block of sh has to follow its comment"));
        }
    }
    Ok(blocks)
}

fn append_command_line(commands: &mut Vec<DocCommand>, number: usize, line: &str) {
    let goes_on = commands.last_mut().filter(|before| before.text.ends_with('\\'));
    if let Some(before) = goes_on {
        before.text.push('\n');
        before.text.push_str(line);
    } else if !line.is_empty() && !line.starts_with('#') {
        commands.push(DocCommand { line: number, text: without_comment(line).to_owned() });
    }
}

/// The command without a trailing comment.
fn without_comment(line: &str) -> &str {
    line.split(" # ").next().unwrap_or(line).trim_end()
}

fn parse_mark(line: &str) -> Option<BlockMark> {
    let said = line.strip_prefix("<!--")?.strip_suffix("-->")?;
    let (kind, rest) = said.split_once(':')?;
    let rest = rest.trim().to_owned();
    match kind.trim() {
        "not run" => Some(BlockMark::NotRun(rest)),
        "needs" => Some(BlockMark::Needs(rest.split_whitespace().map(str::to_owned).collect())),
        "long" => Some(BlockMark::Long(rest)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn doc_command(line: usize, text: &str) -> DocCommand {
        DocCommand { line, text: text.to_owned() }
    }

    #[test]
    fn command_blocks_are_found_with_their_marks() {
        let page = "a\n```sh\ntenmil list   # all\n\n# said\nb \\\n  c\n```\n\
                    ```toml\n```\n<!-- needs: jq root -->\n```sh\nd &\n```\n";
        let needs = BlockMark::Needs(vec!["jq".into(), "root".into()]);
        let expected = vec![
            CommandBlock {
                line: 2,
                mark: None,
                commands: vec![doc_command(3, "tenmil list"), doc_command(6, "b \\\n  c")],
            },
            CommandBlock { line: 12, mark: Some(needs), commands: vec![doc_command(13, "d &")] },
        ];
        assert_eq!(command_blocks("page", page), Ok(expected));
    }

    #[test]
    fn mark_must_precede_its_block() {
        let why = command_blocks("page", "<!-- long: x -->\ntext\n```sh\n```\n").unwrap_err();
        assert!(why.starts_with("page:2: "), "{why}");
        let other = command_blocks("page", "<!-- made by something -->\n```sh\n```\n").unwrap();
        assert_eq!(other[0].mark, None);
    }
}
