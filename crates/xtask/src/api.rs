//! `cargo xtask api`: the public API of the crate `tenmil`, as text.
//!
//! ```text
//!   src/lib.rs ── pub mod a ──▶ src/a.rs, src/a/… ── public items, without bodies
//!              └─ pub use b::C ─▶ src/b.rs ── C alone, with its implementations
//! ```
//!
//! A test limits the number of public types. The compiler rejects a public item without documentation
//! (`missing_docs`).

mod api_surface;

use std::path::Path;

/// Prints the API.
pub(crate) fn run_api() -> Result<bool, String> {
    let surface = api_surface::surface_of_crate(
        &crate::book::repository_root()?.join("crates/tenmil/src"),
        "tenmil",
    )?;
    print!("{}", surface.text);
    println!("// {} public types", surface.types.len());
    Ok(true)
}

/// The API as a page of the book.
pub(crate) fn api_page(root: &Path) -> Result<String, String> {
    let surface = api_surface::surface_of_crate(&root.join("crates/tenmil/src"), "tenmil")?;
    Ok(format!(
        "# Library API\n\nSee every public item of the crate `tenmil`; `cargo doc -p tenmil --open` describes them.\n\n\
         <!-- Generated from crates/tenmil/src by `cargo xtask book`. -->\n\n```rust,ignore\n{}```\n",
        surface.text
    ))
}

#[cfg(test)]
mod tests {
    use super::api_surface;

    /// Limit of public types: a reader should be able to read the list.
    const TYPES_MAX: usize = 36;

    #[test]
    fn library_has_few_public_types() {
        let root = crate::book::repository_root().unwrap();
        let types =
            api_surface::surface_of_crate(&root.join("crates/tenmil/src"), "tenmil").unwrap().types;
        assert!(types.iter().any(|name| name.ends_with("::Device")), "{types:#?}");
        assert!(types.len() <= TYPES_MAX, "{} types, at most {TYPES_MAX}: {types:#?}", types.len());
    }
}
