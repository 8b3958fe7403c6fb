//! Removal of a table, with the comment that belongs to it and without those that do not.
//!
//! The comment lines directly above a table belong to it. Those above an empty line, such as the head of
//! the file, stay.

use toml_edit::{Decor, DocumentMut, Item, Table};

/// Removes the table at `indexes`, each in the array that `keys` names.
pub(super) fn remove_table_with_comment(
    document: &mut DocumentMut,
    keys: &[&str],
    indexes: &[usize],
) {
    let Some((last, above)) = keys.split_last() else { return };
    let mut parent: &mut Table = document;
    for (key, at) in above.iter().zip(indexes) {
        parent = super::table_at(parent, key, *at);
    }
    let at = indexes[keys.len() - 1];
    let all = super::array_of_tables(parent, last);
    let Some(removed) = all.get(at) else { return };
    let (kept, position) = (comment_that_stays(removed.decor()), removed.position());
    all.remove(at);
    if all.is_empty() {
        parent.remove(last);
    }
    if !kept.is_empty() {
        prepend_to_next_table(document, position.unwrap_or(isize::MAX), &kept);
    }
}

/// Blocks of comment lines above the one that belongs to the table.
fn comment_that_stays(decor: &Decor) -> String {
    let prefix = decor.prefix().and_then(|prefix| prefix.as_str()).unwrap_or_default();
    let Some(end) = prefix.rfind("\n\n") else { return String::new() };
    match prefix[..end].trim().is_empty() {
        true => String::new(),
        false => prefix[..=end].to_owned(),
    }
}

fn prepend_to_next_table(document: &mut DocumentMut, position: isize, text: &str) {
    let mut next = None;
    find_next_position(document, position, &mut next);
    let is_done = next.is_some_and(|next| prepend_to_table_at(document, next, text));
    if !is_done {
        let trailing = document.trailing().as_str().unwrap_or_default();
        let trailing = format!("{text}{trailing}");
        document.set_trailing(trailing);
    }
}

fn find_next_position(table: &Table, after: isize, next: &mut Option<isize>) {
    for_each_table(table, &mut |inner| {
        if let Some(at) = inner.position().filter(|at| *at > after) {
            *next = Some(next.map_or(at, |next| next.min(at)));
        }
    });
}

fn for_each_table(table: &Table, visit: &mut dyn FnMut(&Table)) {
    for (_, item) in table {
        match item {
            Item::Table(inner) => {
                visit(inner);
                for_each_table(inner, visit);
            }
            Item::ArrayOfTables(all) => all.iter().for_each(|inner| {
                visit(inner);
                for_each_table(inner, visit);
            }),
            Item::Value(_) | Item::None => {}
        }
    }
}

/// Returns whether the table was found.
fn prepend_to_table_at(table: &mut Table, position: isize, text: &str) -> bool {
    let mut prepend = |inner: &mut Table| {
        if inner.position() == Some(position) {
            let decor = inner.decor_mut();
            let prefix = decor.prefix().and_then(|prefix| prefix.as_str()).unwrap_or_default();
            let prefix = format!("{text}{prefix}");
            decor.set_prefix(prefix);
            return true;
        }
        prepend_to_table_at(inner, position, text)
    };
    table.iter_mut().any(|(_, item)| match item {
        Item::Table(inner) => prepend(inner),
        Item::ArrayOfTables(all) => all.iter_mut().any(&mut prepend),
        Item::Value(_) | Item::None => false,
    })
}
