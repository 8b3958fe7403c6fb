//! Feeding a target, and keeping the input that it could not stomach.
//!
//! The release profile aborts on a panic, so nothing can be caught there. A panic hook writes the
//! input that is being fed to a file and ends the process: the same in every profile.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

/// A fuzz target: its name, and what it does with bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    /// What it is called on the command line, and its corpus' folder.
    pub(crate) name: &'static str,
    /// Panics if something does not hold that must.
    pub(crate) feed: fn(&[u8]),
}

/// A target with a planted bug: proof that one would be found.
pub(crate) const CANARY: Target = Target { name: "canary", feed: canary };

thread_local! {
    /// What is being fed.
    static CURRENT: RefCell<(&'static str, Vec<u8>)> = const { RefCell::new(("", Vec::new())) };
}

impl Target {
    /// Feeds `bytes` to it. Does not return if that panics.
    pub(crate) fn try_out(self, bytes: &[u8]) {
        CURRENT.with_borrow_mut(|(name, input)| {
            *name = self.name;
            input.clear();
            input.extend_from_slice(bytes);
        });
        (self.feed)(bytes);
    }
}

impl PartialEq for Target {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

/// From now on, a panic keeps the input in `folder`, says how to see it again, and ends the process
/// with exit code 1.
pub(crate) fn keep_findings(folder: &Path) {
    let folder = folder.to_owned();
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell(panic);
        CURRENT.with_borrow(|(name, bytes)| keep(&folder, name, bytes));
        std::process::exit(1);
    }));
}

fn keep(folder: &Path, name: &str, bytes: &[u8]) {
    let file: PathBuf = folder.join(format!("fuzz-{name}.input"));
    let which = if name == CANARY.name { "--canary".into() } else { format!("--target {name}") };
    match std::fs::write(&file, bytes) {
        Ok(()) => eprintln!(
            "fuzz {name}: found; repeat with `cargo run -p tenmil-fuzz -- {which} --replay {}`",
            file.display()
        ),
        Err(error) => eprintln!("fuzz {name}: found {bytes:?}; not kept: {error}"),
    }
}

/// Takes it for granted that no word begins with two bytes of ones.
fn canary(bytes: &[u8]) {
    for word in bytes.chunks_exact(4) {
        assert_ne!(word[..2], [0xff, 0xff], "the planted bug");
    }
}
