//! A crate outside this workspace: it depends on `tenmil` alone, builds README's program, the front page's
//! and every example, and runs them. Takes a minute or more; `.ci/run` runs it:
//!
//! ```text
//! cargo test --workspace --test outside -- --ignored --nocapture
//! ```

#![expect(clippy::unwrap_used, reason = "a test may")]
#![allow(clippy::disallowed_methods, reason = "it writes the files of a crate")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tenmil_base::Span;
use tenmil_linux::Clock;

/// Directory of this crate.
const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// Most packages of a crate that depends on `tenmil` alone: this project's and others', itself not counted.
/// Of these, 16 are for the hash functions and powers of DH-HMAC-CHAP.
const PACKAGES_MAX: usize = 44;

/// Far longer than any program takes on a busy machine.
const TIME_LIMIT: Span = Span::from_secs(120);

/// Executors are what two of the examples are about, and no dependency of the crate.
const MANIFEST: &str = r#"
[package]
name = "outside"
version = "0.0.0"
edition = "2024"

[dependencies]
tenmil = { path = "TENMIL" }

[dev-dependencies]
smol = "2"
tokio = { version = "1", features = ["macros", "rt"] }

[profile.dev]
debug = false
incremental = false
"#;

/// Opens devices of features that the crate does not have.
const WITHOUT_FEATURES: &str = r#"
use tenmil::{Access, Runtime};

fn main() {
    let rt = Runtime::new().expect("a runtime");
    for (uri, feature) in [("rbd:pool/image", "`rbd`"), ("vfio-user:/nonexistent", "`vfio-user`")] {
        let refused = rt.block_on(rt.open(uri, Access::ReadOnly)).err().expect("an error").to_string();
        assert!(refused.contains(&format!("the feature {feature} of the crate `tenmil`")), "{refused}");
    }
}
"#;

/// A crate in a temporary directory. What its dependencies are built to is kept for the next run.
struct ExternalCrate {
    directory: tempfile::TempDir,
    target: PathBuf,
}

impl ExternalCrate {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("Cargo.toml"), MANIFEST.replace("TENMIL", HERE)).unwrap();
        // The same versions as in the workspace, which have been downloaded.
        fs::copy(Path::new(HERE).join("../../Cargo.lock"), at("Cargo.lock")).unwrap();
        fs::create_dir_all(at("src/bin")).unwrap();
        fs::create_dir(at("examples")).unwrap();
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("outside");
        Self { directory, target }
    }

    fn run_cargo(&self, arguments: &[&str]) -> String {
        let output = Command::new(env!("CARGO"))
            .args(arguments)
            .arg("--offline")
            .current_dir(self.directory.path())
            .env("CARGO_TARGET_DIR", &self.target)
            // Those of the test itself.
            .env_remove("CARGO_MANIFEST_DIR")
            .env_remove("RUSTC_WORKSPACE_WRAPPER")
            .stderr(Stdio::piped())
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "cargo {}:\n{errors}", arguments.join(" "));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs a program, which must end well.
    fn run_program(&self, program: &str, arguments: &[&str]) {
        let path = self.target.join("debug").join(program);
        let clock = Clock::on_kernel_clock();
        let end = clock.now().after(TIME_LIMIT);
        let mut child = Command::new(path).args(arguments).spawn().unwrap();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if clock.now() > end {
                child.kill().unwrap();
                panic!("{program}: no end after {TIME_LIMIT}");
            }
            tenmil_linux::named_thread::sleep(Span::from_ms(5));
        };
        assert!(status.success(), "{program}: {status}");
    }
}

impl Drop for ExternalCrate {
    /// Removes what was built of the crate itself: its path differs from run to run.
    fn drop(&mut self) {
        let mut clean = Command::new(env!("CARGO"));
        clean.args(["clean", "--offline", "--quiet", "--package", "outside"]);
        clean.current_dir(self.directory.path()).env("CARGO_TARGET_DIR", &self.target);
        let _ = clean.status();
    }
}

/// The first program between fences in a text, each of whose lines begins with `prefix`.
fn readme_program(text: &str, prefix: &str, fence: &str) -> String {
    let lines = text.lines().filter_map(|line| line.strip_prefix(prefix));
    let lines = lines.skip_while(|line| *line != fence).skip(1);
    let lines = lines.take_while(|line| !line.trim_start().starts_with("```"));
    let program: String =
        lines.flat_map(|line| [line.strip_prefix(' ').unwrap_or(line), "\n"]).collect();
    assert!(program.contains("fn main()"), "no program behind {fence}");
    program
}

#[test]
#[ignore = "builds the library a second time"]
fn readme_and_examples_build_and_run_in_a_crate_that_depends_on_tenmil_alone() {
    let outside = ExternalCrate::new();
    let at = |name: &str| outside.directory.path().join(name);
    let readme = include_str!("../../../README.md");
    fs::write(at("src/main.rs"), readme_program(readme, "", "```rust")).unwrap();
    let front_page = include_str!("../src/lib.rs");
    fs::write(at("src/bin/front_page.rs"), readme_program(front_page, "//!", " ```")).unwrap();
    fs::write(at("src/bin/without_features.rs"), WITHOUT_FEATURES).unwrap();
    let mut examples = BTreeSet::new();
    for entry in fs::read_dir(Path::new(HERE).join("examples")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        fs::copy(&path, at("examples").join(name)).unwrap();
        examples.insert(name.strip_suffix(".rs").unwrap().to_owned());
    }
    assert!(examples.len() >= 8, "{examples:?}");

    let tree = outside.run_cargo(&[
        "tree",
        "--edges",
        "normal",
        "--prefix",
        "none",
        "--package",
        "outside",
    ]);
    // `NAME VERSION …`; packages that are named again end with `(*)`.
    let package = |line: &str| line.split_whitespace().take(2).collect::<Vec<_>>().join(" ");
    let packages: BTreeSet<String> =
        tree.lines().map(package).filter(|name| !name.starts_with("outside ")).collect();
    println!("packages of a crate that depends on tenmil alone: {}", packages.len());
    assert!(packages.len() <= PACKAGES_MAX, "expected at most {PACKAGES_MAX}: {packages:#?}");
    for executor in ["tokio ", "smol ", "clap ", "ratatui "] {
        assert!(!packages.iter().any(|name| name.starts_with(executor)), "{executor}");
    }

    outside.run_cargo(&["build", "--quiet", "--bins", "--examples"]);
    outside.run_program("outside", &[]);
    outside.run_program("front_page", &[]);
    outside.run_program("without_features", &[]);
    for example in &examples {
        let arguments: &[&str] = if example == "mixed" { &["ram:64m", "1"] } else { &[] };
        outside.run_program(&format!("examples/{example}"), arguments);
    }
}
