//! Runs a fuzz target and saves a crashing input.
//!
//! The release profile aborts on a panic, so a panic cannot be caught there. A panic hook writes
//! the current input to a file and ends the process, in every profile.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

/// Fuzz target: a name and a function of bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FuzzTarget {
    /// Name on the command line and of the corpus folder.
    pub(crate) name: &'static str,
    /// Panics if an invariant is violated.
    pub(crate) feed: fn(&[u8]),
}

/// Target with an injected bug, to prove that bugs are found.
pub(crate) const INJECTED_BUG: FuzzTarget = FuzzTarget { name: "canary", feed: fuzz_injected_bug };

thread_local! {
    /// Current target and input.
    static CURRENT: RefCell<(&'static str, Vec<u8>)> = const { RefCell::new(("", Vec::new())) };
}

impl FuzzTarget {
    /// Runs the target on `bytes`. Does not return if that panics.
    pub(crate) fn run_input(self, bytes: &[u8]) {
        CURRENT.with_borrow_mut(|(name, input)| {
            *name = self.name;
            input.clear();
            input.extend_from_slice(bytes);
        });
        (self.feed)(bytes);
    }
}

impl PartialEq for FuzzTarget {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

/// Installs a panic hook that saves the input in `folder`, prints how to reproduce the panic, and
/// ends the process with exit code 1.
pub(crate) fn install_crash_saving_hook(folder: &Path) {
    let folder = folder.to_owned();
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tell(panic);
        CURRENT.with_borrow(|(name, bytes)| save_input(&folder, name, bytes));
        std::process::exit(1);
    }));
}

fn save_input(folder: &Path, name: &str, bytes: &[u8]) {
    let file: PathBuf = folder.join(format!("fuzz-{name}.input"));
    let which = if name == INJECTED_BUG.name {
        "--injected-bugs".into()
    } else {
        format!("--target {name}")
    };
    match std::fs::write(&file, bytes) {
        Ok(()) => eprintln!(
            "fuzz {name}: found; repeat with `cargo run -p tenmil-fuzz -- {which} --replay {}`",
            file.display()
        ),
        Err(error) => eprintln!("fuzz {name}: found {bytes:?}; not kept: {error}"),
    }
}

/// Injected bug: assumes that no word begins with two bytes of ones.
fn fuzz_injected_bug(bytes: &[u8]) {
    for word in bytes.chunks_exact(4) {
        assert_ne!(word[..2], [0xff, 0xff], "the planted bug");
    }
}
