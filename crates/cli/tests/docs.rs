//! The documents lead to each other, and to nothing that is not there.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// All pages of the project.
fn pages() -> Vec<PathBuf> {
    let root = Path::new(ROOT);
    let is_page = |path: &PathBuf| path.extension().is_some_and(|end| end == "md");
    let of = |directory: &Path| {
        let entries = fs::read_dir(directory).expect("a directory");
        entries.map(|entry| entry.expect("an entry").path()).filter(is_page).collect::<Vec<_>>()
    };
    [of(root), of(&root.join("docs"))].concat()
}

/// Where the links of a page lead: `[text](where)`.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| rest.split(')').next())
}

/// What a heading is called in a link.
fn anchor(heading: &str) -> String {
    let kept = heading.trim_start_matches('#').trim().chars();
    let kept = kept.filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

#[test]
fn every_link_leads_somewhere() {
    for page in pages() {
        let text = fs::read_to_string(&page).expect("a page");
        for link in links(&text).filter(|link| !link.contains("://")) {
            let (file, place) = link.split_once('#').unwrap_or((link, ""));
            let directory = page.parent().expect("a page lies in a directory");
            let to = if file.is_empty() { page.clone() } else { directory.join(file) };
            assert!(to.exists(), "{}: {link} leads nowhere", page.display());
            if !place.is_empty() && to.extension().is_some_and(|end| end == "md") {
                let text = fs::read_to_string(&to).expect("a page");
                let mut headings = text.lines().filter(|line| line.starts_with('#'));
                let is_there = headings.any(|heading| anchor(heading) == place);
                assert!(is_there, "{}: no heading is called #{place} in {file}", page.display());
            }
        }
    }
}

#[test]
fn the_book_has_every_page_once() {
    let docs = Path::new(ROOT).join("docs");
    let summary = fs::read_to_string(docs.join("SUMMARY.md")).expect("a summary");
    let listed: Vec<&str> = links(&summary).collect();
    let once: BTreeSet<&str> = listed.iter().copied().collect();
    assert_eq!(once.len(), listed.len(), "a page is listed twice");
    let there = pages().into_iter().filter(|page| page.starts_with(&docs));
    let there = there.map(|page| page.file_name().expect("a name").display().to_string());
    let there: BTreeSet<String> = there.filter(|name| name != "SUMMARY.md").collect();
    let listed: BTreeSet<String> = listed.into_iter().map(str::to_owned).collect();
    assert_eq!(listed, there);
}
