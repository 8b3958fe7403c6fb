//! `cargo xtask book`: the documentation with references generated from the code, in `target/book`.
//!
//! ```text
//!   README.md, docs/… ────────────── copied ──▶ README.md, docs/…
//!   docs/README.md ── headings and links ─────▶ SUMMARY.md, the contents that mdbook reads
//!   tenmil … --help ─────────────────────────▶ docs/reference/commands.md
//!   tenmil get --markdown ───────────────────▶ docs/reference/rpc-methods.md
//!   crates/tenmil/src ───────────────────────▶ docs/reference/library-api.md
//! ```
//!
//! The task fails if a link leads nowhere, a page is not in the index or names a file that does not exist,
//! or a command or an option has no description.

mod command_reference;
mod links;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Options of `cargo xtask book`.
#[derive(Debug, clap::Args)]
pub(crate) struct BookOptions {
    /// Program that prints the references
    #[arg(long, default_value = "target/release/tenmil")]
    binary: PathBuf,
}

/// The index, whose tables link all pages.
const INDEX: &str = "docs/README.md";

/// Directory of the generated pages within the book.
const REFERENCE: &str = "docs/reference";

/// Generated page.
struct GeneratedPage {
    file: &'static str,
    title: &'static str,
    text: String,
}

/// Writes the book; returns false if a check fails.
pub(crate) fn run_book(options: &BookOptions) -> Result<bool, String> {
    let root = repository_root()?;
    let book = root.join("target/book");
    if book.exists() {
        fs::remove_dir_all(&book).map_err(|why| format!("remove {}: {why}", book.display()))?;
    }
    let pages = all_pages(&root)?;
    for page in &pages {
        write_file(&book.join(page), &read_file(&root.join(page))?)?;
    }
    let mut problems = unlisted_pages(&root, &pages)?;
    problems.extend(links::broken_links(&root, &pages)?);
    problems.extend(links::missing_files(&root, &pages)?);
    let (commands, undescribed) = command_reference::command_reference(&options.binary)?;
    problems.extend(undescribed);
    let generated = [
        GeneratedPage { file: "commands.md", title: "Commands and options", text: commands },
        GeneratedPage {
            file: "rpc-methods.md",
            title: "RPC methods and events",
            text: program_output(&options.binary, &["get", "--markdown"])?,
        },
        GeneratedPage {
            file: "library-api.md",
            title: "Library API",
            text: crate::api::api_page(&root)?,
        },
    ];
    for page in &generated {
        write_file(&book.join(REFERENCE).join(page.file), &page.text)?;
    }
    write_file(
        &book.join("SUMMARY.md"),
        &table_of_contents(&read_file(&root.join(INDEX))?, &generated),
    )?;
    for problem in &problems {
        println!("book: {problem}");
    }
    let count = pages.len() + generated.len();
    println!("book: {count} pages in {}, {} problems", book.display(), problems.len());
    Ok(problems.is_empty())
}

/// The root of the repository.
pub(crate) fn repository_root() -> Result<PathBuf, String> {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    root.canonicalize().map_err(|why| format!("find the repository: {why}"))
}

/// All pages, relative to the root: those beside README.md, then those of docs and its directories.
pub(crate) fn all_pages(root: &Path) -> Result<Vec<PathBuf>, String> {
    let mut pages = Vec::new();
    let mut directories = vec![PathBuf::new(), PathBuf::from("docs")];
    let mut at = 0;
    while let Some(directory) = directories.get(at).cloned() {
        let path = root.join(&directory);
        let entries = fs::read_dir(&path);
        let entries = entries.map_err(|why| format!("read {}: {why}", path.display()))?;
        let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name()).collect();
        names.sort();
        for name in names {
            let page = directory.join(&name);
            if root.join(&page).is_dir() && at > 0 {
                directories.push(page);
            } else if page.extension().is_some_and(|end| end == "md") {
                pages.push(page);
            }
        }
        at += 1;
    }
    Ok(pages)
}

/// Pages of docs that the index does not link exactly once.
fn unlisted_pages(root: &Path, pages: &[PathBuf]) -> Result<Vec<String>, String> {
    let index = read_file(&root.join(INDEX))?;
    let listed: Vec<PathBuf> =
        links::link_targets(&index).map(|link| Path::new("docs").join(link)).collect();
    let is_indexed =
        |page: &&PathBuf| page.starts_with("docs") && page.as_path() != Path::new(INDEX);
    let mut problems = Vec::new();
    for page in pages.iter().filter(is_indexed) {
        let count = listed.iter().filter(|link| *link == page).count();
        if count != 1 {
            problems.push(format!("{INDEX} links {} {count} times, expected once", page.display()));
        }
    }
    Ok(problems)
}

/// Contents in mdbook's form: the headings of the index with their links, and the generated pages below
/// the last heading.
fn table_of_contents(index: &str, generated: &[GeneratedPage]) -> String {
    let mut text = format!("# Summary\n\n[tenmil](README.md)\n\n[Index]({INDEX})\n");
    let mut listed = BTreeSet::new();
    for line in index.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            text += &format!("\n# {heading}\n\n");
        }
        for part in line.split('[').skip(1) {
            let Some((title, link)) = part.split_once("](") else { continue };
            let link = link.split([')', '#']).next().unwrap_or_default();
            let page = links::resolve_link(Path::new(INDEX), link);
            if listed.insert(page.clone()) {
                text += &format!("- [{title}]({})\n", page.display());
            }
        }
    }
    for page in generated {
        text += &format!("- [{}]({REFERENCE}/{})\n", page.title, page.file);
    }
    text
}

/// Standard output of the program.
fn program_output(binary: &Path, words: &[&str]) -> Result<String, String> {
    let shown = || format!("{} {}", binary.display(), words.join(" "));
    let ended = Command::new(binary).args(words).output();
    let ended = ended.map_err(|why| format!("run {}: {why}; `cargo build --release`", shown()))?;
    if !ended.status.success() {
        return Err(format!("{}: {}", shown(), String::from_utf8_lossy(&ended.stderr).trim()));
    }
    String::from_utf8(ended.stdout).map_err(|why| format!("{}: {why}", shown()))
}

fn read_file(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|why| format!("read {}: {why}", path.display()))
}

fn write_file(path: &Path, text: &str) -> Result<(), String> {
    let directory = path.parent().unwrap_or(path);
    fs::create_dir_all(directory)
        .and_then(|()| fs::write(path, text))
        .map_err(|why| format!("write {}: {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_is_in_the_index_once() {
        let root = repository_root().unwrap();
        let pages = all_pages(&root).unwrap();
        assert!(pages.len() > 30, "{pages:?}");
        assert_eq!(unlisted_pages(&root, &pages), Ok(Vec::new()));
    }

    #[test]
    fn contents_have_the_headings_and_links_of_the_index() {
        let index = "# T\n\n## Users\n\n| a | [One](user/one.md) and [two](user/two.md#x) |\n";
        let page = GeneratedPage { file: "commands.md", title: "Commands", text: String::new() };
        let expected = "# Users\n\n- [One](docs/user/one.md)\n- [two](docs/user/two.md)\n\
                        - [Commands](docs/reference/commands.md)\n";
        let text = table_of_contents(index, &[page]);
        assert!(text.ends_with(expected), "{text}");
    }
}
