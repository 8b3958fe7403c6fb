//! Public items of a crate, extracted from its sources.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use syn::{
    Attribute, Fields, File, ImplItem, Item, ItemImpl, ItemMod, ItemUse, TraitItem, Type, UseTree,
    Visibility, parse_quote,
};

/// The public API of the crate `name` with the sources in `sources`.
pub(super) fn surface_of_crate(sources: &Path, name: &str) -> Result<ApiSurface, String> {
    let root =
        SourceModule { file: sources.join("lib.rs"), inside: sources.into(), path: name.into() };
    let mut surface = ApiSurface::default();
    surface.write_module(&root, None)?;
    Ok(surface)
}

/// Public items of a crate.
#[derive(Debug, Default)]
pub(super) struct ApiSurface {
    /// Items of each module without documentation, bodies, values and private parts.
    pub(super) text: String,
    /// Paths of structs, enums, traits and aliases, also of those re-exported from other crates.
    pub(super) types: BTreeSet<String>,
    /// Modules that were written already, with the selected names.
    done: BTreeSet<(String, Option<BTreeSet<String>>)>,
}

/// Module with its file, the directory of its submodules, and its path.
struct SourceModule {
    file: PathBuf,
    inside: PathBuf,
    path: String,
}

impl SourceModule {
    fn submodule(&self, name: &str) -> Self {
        let inside = self.inside.join(name);
        let flat = self.inside.join(format!("{name}.rs"));
        let file = if flat.exists() { flat } else { inside.join("mod.rs") };
        Self { file, inside, path: format!("{}::{name}", self.path) }
    }
}

impl ApiSurface {
    /// Writes a public module, or only the items `names` of a private one.
    fn write_module(
        &mut self,
        module: &SourceModule,
        names: Option<&BTreeSet<String>>,
    ) -> Result<(), String> {
        if !self.done.insert((module.path.clone(), names.cloned())) {
            return Ok(());
        }
        let text = fs::read_to_string(&module.file)
            .map_err(|error| format!("read {}: {error}", module.file.display()))?;
        let file = syn::parse_file(&text)
            .map_err(|error| format!("{}: {error}", module.file.display()))?;
        let items: Vec<Item> = file.items.into_iter().filter(|item| !is_hidden(item)).collect();
        let shown = |name: &str| names.is_none_or(|names| names.contains(name));
        let public: BTreeSet<String> =
            items.iter().filter_map(public_name).filter(|name| shown(name)).collect();
        let types = items.iter().filter(|item| is_type(item)).filter_map(public_name);
        let types = types.filter(|name| public.contains(name));
        self.types.extend(types.map(|name| format!("{}::{name}", module.path)));
        let kept = items.iter().filter_map(|item| match item {
            Item::Impl(of) => public_impl(of, &public),
            _ => {
                public_name(item).filter(|name| public.contains(name)).map(|_| without_bodies(item))
            }
        });
        let kept: Vec<Item> = kept.collect();
        let uses = items.iter().filter_map(|item| match item {
            Item::Use(of) if is_public(&of.vis) && names.is_none() => Some(of),
            _ => None,
        });
        let uses: Vec<&ItemUse> = uses.collect();
        let modules: BTreeSet<String> =
            items.iter().filter_map(as_file_module).map(|inner| inner.ident.to_string()).collect();
        for of in &uses {
            self.add_foreign_types(&module.path, &of.tree, &modules);
        }
        self.write_items(&module.path, kept, &uses);
        for inner in items.iter().filter_map(as_file_module) {
            if is_public(&inner.vis) && names.is_none() {
                self.write_module(&module.submodule(&inner.ident.to_string()), None)?;
            }
        }
        self.write_reexports(module, &items, names)
    }

    /// Writes items of private modules that are re-exported here.
    fn write_reexports(
        &mut self,
        module: &SourceModule,
        items: &[Item],
        names: Option<&BTreeSet<String>>,
    ) -> Result<(), String> {
        for inner in items.iter().filter_map(as_file_module).filter(|inner| !is_public(&inner.vis))
        {
            let inner_name = inner.ident.to_string();
            let mut wanted = BTreeSet::new();
            for item in items {
                if let Item::Use(of) = item
                    && is_public(&of.vis)
                {
                    imported_names(&of.tree, &inner_name, false, &mut wanted);
                }
            }
            wanted.retain(|name| names.is_none_or(|names| names.contains(name)));
            if !wanted.is_empty() {
                self.write_module(&module.submodule(&inner_name), Some(&wanted))?;
            }
        }
        Ok(())
    }

    /// Adds the types that a module re-exports from other crates; `modules` are those of the crate.
    fn add_foreign_types(&mut self, path: &str, tree: &UseTree, modules: &BTreeSet<String>) {
        let mut names = BTreeSet::new();
        match tree {
            UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.add_foreign_types(path, tree, modules));
            }
            UseTree::Path(from) => {
                let from = from.ident.to_string();
                if !["self", "crate", "super"].contains(&&*from) && !modules.contains(&from) {
                    imported_names(tree, &from, false, &mut names);
                }
            }
            _ => {}
        }
        names.retain(|name| name.starts_with(char::is_uppercase));
        // Constants have no lower-case letter.
        names.retain(|name| name.contains(char::is_lowercase));
        self.types.extend(names.into_iter().map(|name| format!("{path}::{name}")));
    }

    fn write_items(&mut self, path: &str, mut items: Vec<Item>, uses: &[&ItemUse]) {
        let uses = uses.iter().map(|of| Item::Use(ItemUse { attrs: Vec::new(), ..(*of).clone() }));
        items.splice(0..0, uses);
        if items.is_empty() {
            return;
        }
        let file = File { shebang: None, attrs: Vec::new(), items };
        self.text += &format!("// {path}\n\n{}\n", prettyplease::unparse(&file));
    }
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// Whether an item is hidden from the documentation or only for tests.
fn is_hidden(item: &Item) -> bool {
    let attributes = match item {
        Item::Mod(of) => &of.attrs,
        Item::Fn(of) => &of.attrs,
        Item::Struct(of) => &of.attrs,
        Item::Impl(of) => &of.attrs,
        Item::Use(of) => &of.attrs,
        Item::Const(of) => &of.attrs,
        _ => return false,
    };
    has_hidden(attributes)
}

/// Whether one of the attributes hides its item.
fn has_hidden(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else { return false };
        let words = list.tokens.to_string();
        let is_of_tests = list.path.is_ident("cfg") && (words == "test" || words == "doctest");
        is_of_tests || (list.path.is_ident("doc") && words == "hidden")
    })
}

fn as_file_module(item: &Item) -> Option<&ItemMod> {
    match item {
        Item::Mod(of) if of.content.is_none() => Some(of),
        _ => None,
    }
}

fn is_type(item: &Item) -> bool {
    matches!(item, Item::Struct(_) | Item::Enum(_) | Item::Trait(_) | Item::Type(_))
}

/// Name of a public item.
fn public_name(item: &Item) -> Option<String> {
    let (visibility, name) = match item {
        Item::Struct(of) => (&of.vis, &of.ident),
        Item::Enum(of) => (&of.vis, &of.ident),
        Item::Trait(of) => (&of.vis, &of.ident),
        Item::Fn(of) => (&of.vis, &of.sig.ident),
        Item::Const(of) => (&of.vis, &of.ident),
        Item::Static(of) => (&of.vis, &of.ident),
        Item::Type(of) => (&of.vis, &of.ident),
        _ => return None,
    };
    is_public(visibility).then(|| name.to_string())
}

/// The item without documentation, bodies, values and private parts.
fn without_bodies(item: &Item) -> Item {
    let mut item = item.clone();
    match &mut item {
        Item::Struct(of) => {
            keep_derived(&mut of.attrs);
            keep_public(&mut of.fields);
        }
        Item::Enum(of) => {
            keep_derived(&mut of.attrs);
            for variant in &mut of.variants {
                variant.attrs.clear();
                variant.fields.iter_mut().for_each(|field| field.attrs.clear());
            }
        }
        Item::Trait(of) => {
            of.attrs.clear();
            for inner in &mut of.items {
                if let TraitItem::Fn(function) = inner {
                    function.attrs.clear();
                    function.default = function.default.as_ref().map(|_| parse_quote!({}));
                }
            }
        }
        Item::Fn(of) => {
            of.attrs.clear();
            of.block = parse_quote!({});
        }
        Item::Const(of) => {
            of.attrs.clear();
            of.expr = parse_quote!(_);
        }
        Item::Static(of) => {
            of.attrs.clear();
            of.expr = parse_quote!(_);
        }
        Item::Type(of) => of.attrs.clear(),
        _ => {}
    }
    item
}

fn keep_derived(attributes: &mut Vec<Attribute>) {
    attributes.retain(|attribute| {
        attribute.path().is_ident("derive") || attribute.path().is_ident("non_exhaustive")
    });
}

fn keep_public(fields: &mut Fields) {
    match fields {
        Fields::Named(named) => {
            let kept = named.named.iter().filter(|field| is_public(&field.vis)).cloned();
            named.named = kept.collect();
            named.named.iter_mut().for_each(|field| field.attrs.clear());
        }
        // Fields of a tuple struct are identified by position, so private ones stay.
        Fields::Unnamed(unnamed) => unnamed.unnamed.iter_mut().for_each(|f| f.attrs.clear()),
        Fields::Unit => {}
    }
}

/// An implementation for one of the types: its public methods, or the trait name.
fn public_impl(of: &ItemImpl, types: &BTreeSet<String>) -> Option<Item> {
    let Type::Path(path) = &*of.self_ty else { return None };
    let name = path.path.segments.last()?.ident.to_string();
    if !types.contains(&name) {
        return None;
    }
    let mut of = of.clone();
    of.attrs.clear();
    if of.trait_.is_some() {
        of.items.clear();
        return Some(Item::Impl(of));
    }
    of.items.retain_mut(|item| match item {
        ImplItem::Fn(function) if is_public(&function.vis) && !has_hidden(&function.attrs) => {
            function.attrs.clear();
            function.block = parse_quote!({});
            true
        }
        ImplItem::Const(constant) if is_public(&constant.vis) => {
            constant.attrs.clear();
            constant.expr = parse_quote!(_);
            true
        }
        _ => false,
    });
    (!of.items.is_empty()).then_some(Item::Impl(of))
}

/// The names that a `use` imports from module `from`.
fn imported_names(tree: &UseTree, from: &str, is_inside: bool, names: &mut BTreeSet<String>) {
    match tree {
        UseTree::Path(path) if path.ident == "self" => {
            imported_names(&path.tree, from, is_inside, names)
        }
        UseTree::Path(path) => {
            imported_names(&path.tree, from, is_inside || path.ident == from, names);
        }
        UseTree::Group(group) => {
            group.items.iter().for_each(|tree| imported_names(tree, from, is_inside, names));
        }
        UseTree::Name(name) if is_inside => {
            names.insert(name.ident.to_string());
        }
        UseTree::Rename(name) if is_inside => {
            names.insert(name.ident.to_string());
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{ApiSurface, surface_of_crate};

    fn test_surface(files: &[(&str, &str)]) -> ApiSurface {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        surface_of_crate(directory.path(), "store").unwrap()
    }

    #[test]
    fn public_items_are_listed_without_bodies_and_private_parts() {
        let surface = test_surface(&[(
            "lib.rs",
            "/// A pool.\n#[derive(Clone)]\npub struct Pool { /// Blocks.\n pub blocks: u32, id: u8 }\n\
             impl Pool { pub fn is_open(&self) -> bool { self.id > 3 } fn lock(&mut self) {} }\n\
             impl Drop for Pool { fn drop(&mut self) { self.lock() } }\n\
             impl Room { #[doc(hidden)] pub fn inspect(&self) {} }\n\
             #[doc(hidden)] pub const WINDOWS: u32 = 9;\n\
             pub(crate) fn open() {}\nfn close() {}\npub const BLOCKS_MAX: u32 = 7;\n\
             #[cfg(test)] mod tests;",
        )]);
        assert_eq!(
            surface.text,
            "// store\n\n#[derive(Clone)]\npub struct Pool {\n    pub blocks: u32,\n}\n\
             impl Pool {\n    pub fn is_open(&self) -> bool {}\n}\nimpl Drop for Pool {}\n\
             pub const BLOCKS_MAX: u32 = _;\n\n"
        );
        assert_eq!(surface.types, ["store::Pool".to_owned()].into());
    }

    #[test]
    fn public_modules_and_re_exports_of_private_ones_are_listed() {
        let surface = test_surface(&[
            ("lib.rs", "pub mod volume;\nmod leg;\npub use leg::Leg;\nmod secret;"),
            (
                "volume.rs",
                "mod map;\npub use self::map::{Map, Run as Extent};\npub fn open() {}\n\
                 pub use other::{Error, MAX, open_all};",
            ),
            ("volume/map.rs", "pub struct Map;\npub struct Run;\npub struct Node;"),
            ("leg/mod.rs", "pub enum Leg {}\npub struct Region;"),
            ("secret.rs", "pub fn key() {}"),
        ]);
        for listed in ["pub fn open() {}", "pub struct Map;", "pub struct Run;", "pub enum Leg {}"]
        {
            assert!(surface.text.contains(listed), "{listed} in\n{}", surface.text);
        }
        for hidden in ["Node", "Region", "key"] {
            assert!(!surface.text.contains(hidden), "{hidden} in\n{}", surface.text);
        }
        let types = ["leg::Leg", "volume::Error", "volume::map::Map", "volume::map::Run"];
        let types = types.map(|name| format!("store::{name}"));
        assert_eq!(surface.types, types.into());
    }
}
