//! Links between pages.

use std::path::{Component, Path, PathBuf};

/// Targets of the links of a page: `[text](target)`.
pub(super) fn link_targets(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| rest.split(')').next())
}

/// The file that `link` in `page` refers to, relative to the root.
pub(super) fn resolve_link(page: &Path, link: &str) -> PathBuf {
    let mut path = page.parent().unwrap_or(Path::new("")).to_path_buf();
    for part in Path::new(link).components() {
        match part {
            Component::ParentDir => _ = path.pop(),
            Component::CurDir => {}
            other => path.push(other),
        }
    }
    path
}

/// Links between files of the repository that lead to no file or no heading.
pub(super) fn broken_links(root: &Path, pages: &[PathBuf]) -> Result<Vec<String>, String> {
    let mut problems = Vec::new();
    for page in pages {
        let text = super::read_file(&root.join(page))?;
        for link in link_targets(&text).filter(|link| !link.contains("://")) {
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { page.clone() } else { resolve_link(page, file) };
            if !root.join(&target).exists() {
                problems.push(format!("{}: no file {link}", page.display()));
            } else if !heading.is_empty() && target.extension().is_some_and(|end| end == "md") {
                let text = super::read_file(&root.join(&target))?;
                if !text
                    .lines()
                    .any(|line| line.starts_with('#') && heading_anchor(line) == heading)
                {
                    problems.push(format!("{}: no heading {link}", page.display()));
                }
            }
        }
    }
    Ok(problems)
}

/// Files of the code that a page names in backquotes and that do not exist.
pub(super) fn missing_files(root: &Path, pages: &[PathBuf]) -> Result<Vec<String>, String> {
    let mut problems = Vec::new();
    for page in pages {
        let text = super::read_file(&root.join(page))?;
        for quoted in text.split('`').skip(1).step_by(2) {
            let file = quoted.split_whitespace().next().unwrap_or_default();
            let is_code = ["crates/", "fuzz/", "scripts/", ".ci/", "docs/"]
                .iter()
                .any(|start| file.starts_with(start));
            // A name in capitals or braces stands for several files.
            let is_pattern = file.contains(|c: char| "{}*".contains(c)) || file.ends_with("NAME");
            if is_code && !is_pattern && !root.join(file).exists() {
                problems.push(format!("{}: no file {file}", page.display()));
            }
        }
    }
    Ok(problems)
}

/// Name of a heading in a link.
fn heading_anchor(heading: &str) -> String {
    let kept = heading.trim_start_matches('#').trim().chars();
    let kept = kept.filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_link_of_the_documentation_leads_to_a_file_and_heading() {
        let root = super::super::repository_root().unwrap();
        let pages = super::super::all_pages(&root).unwrap();
        assert_eq!(broken_links(&root, &pages), Ok(Vec::new()));
    }

    #[test]
    fn every_file_of_the_code_that_a_page_names_exists() {
        let root = super::super::repository_root().unwrap();
        let pages = super::super::all_pages(&root).unwrap();
        assert_eq!(missing_files(&root, &pages), Ok(Vec::new()));
    }

    #[test]
    fn missing_files_and_headings_are_reported() {
        let directory = tempfile::tempdir().unwrap();
        let text = "# One heading\n[a](#one-heading) [b](#two) [c](c.md) [d](https://d)\n\
                    `crates/a.rs`, `crates/NAME`, `.ci/run all`\n";
        std::fs::write(directory.path().join("a.md"), text).unwrap();
        let pages = [PathBuf::from("a.md")];
        let found = broken_links(directory.path(), &pages).unwrap();
        assert_eq!(found, ["a.md: no heading #two", "a.md: no file c.md"]);
        let found = missing_files(directory.path(), &pages).unwrap();
        assert_eq!(found, ["a.md: no file crates/a.rs", "a.md: no file .ci/run"]);
    }

    #[test]
    fn link_is_relative_to_its_page() {
        let page = Path::new("docs/user/a.md");
        assert_eq!(resolve_link(page, "b.md"), Path::new("docs/user/b.md"));
        assert_eq!(resolve_link(page, "../../README.md"), Path::new("README.md"));
    }
}
