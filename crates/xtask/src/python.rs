//! `cargo xtask python`: the Python package `tenmil`, checked where it is installed.
//!
//! ```text
//!   libtenmil.so, as `cargo xtask c-library` makes it ─┐
//!   crates/capi/python ────────────────────────────────┴ pip wheel ─▶ tenmil-*.whl ─ pip install ─▶ a virtual
//!                                                     environment of each Python ─▶ tests, conformance cases
//! ```
//!
//! The wheel lies in `target/packages`, everything else in `target/python`.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::package::{output_of, run_command, target_directory, version};

/// Options of `cargo xtask python`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask python                                          make the wheel, and test it
  cargo xtask python --python python3.9 --python python3.13   with several versions of Python
  cargo xtask python --no-build --rates                       measure it
Tests with numpy, matplotlib and pytest need a package index; without one they are skipped.")]
pub(crate) struct PythonOptions {
    /// Python to install the wheel for, may be repeated
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    python: Vec<PathBuf>,
    /// Use the library that is built
    #[arg(long)]
    no_build: bool,
    /// Measure rates instead of running the tests
    #[arg(long)]
    rates: bool,
}

/// The package, in the repository.
const PACKAGE: &str = "crates/capi/python";
/// What optional tests need.
const OPTIONAL: [&str; 3] = ["numpy", "matplotlib", "pytest"];

/// Makes the wheel and runs its tests; returns false if one fails.
pub(crate) fn run_python(options: &PythonOptions) -> Result<bool, String> {
    let root = crate::book::repository_root()?;
    std::env::set_current_dir(&root).map_err(|why| format!("enter {}: {why}", root.display()))?;
    let room = target_directory(&root).join("python");
    crate::c_library::make_empty(&room)?;
    let library = crate::c_library::build_shared_library(&root, options.no_build)?;
    let first = options.python.first().ok_or("no Python is named")?;
    let wheel = build_wheel(&root, &room, first, &library)?;
    let mut problems = Vec::new();
    for (number, python) in options.python.iter().enumerate() {
        let environment = Environment::create(python, &room.join(format!("venv{number}")), &wheel)?;
        let what = environment.python_version()?;
        let tests = root.join(PACKAGE).join("tests");
        let result = match options.rates {
            true => environment.run(&tests, &["rates.py"]),
            false => environment.run_tests(&tests),
        };
        println!("python: {what}: {}", if result.is_ok() { "ok" } else { "FAILED" });
        problems.extend(result.err().map(|why| format!("{what}: {why}")));
    }
    for problem in &problems {
        println!("python: {problem}");
    }
    if problems.is_empty() {
        println!("python: {}", wheel.display());
    }
    Ok(problems.is_empty())
}

/// Makes the wheel, and returns its path.
fn build_wheel(root: &Path, room: &Path, python: &Path, library: &Path) -> Result<PathBuf, String> {
    let environment = room.join("build");
    run_command(
        "make an environment",
        Command::new(python).args(["-m", "venv"]).arg(&environment),
    )?;
    let packages = target_directory(root).join("packages");
    let mut pip = Command::new(environment.join("bin/pip"));
    pip.args(["wheel", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]);
    pip.arg("--wheel-dir").arg(&packages).arg(root.join(PACKAGE)).env("TENMIL_LIBRARY", library);
    run_command("make the wheel", &mut pip)?;
    let start = format!("tenmil-{}-py3-none-", version());
    let refuse = |why: std::io::Error| format!("list {}: {why}", packages.display());
    let mut found = Vec::new();
    for entry in std::fs::read_dir(&packages).map_err(refuse)? {
        let path = entry.map_err(refuse)?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        if name.is_some_and(|name| name.starts_with(&start)) {
            found.push(path);
        }
    }
    found.pop().ok_or_else(|| format!("{}: no {start}*.whl", packages.display()))
}

/// Virtual environment with the wheel.
struct Environment {
    python: PathBuf,
    has_optional: bool,
}

impl Environment {
    fn create(python: &Path, at: &Path, wheel: &Path) -> Result<Self, String> {
        run_command("make an environment", Command::new(python).args(["-m", "venv"]).arg(at))?;
        let pip = |arguments: &[&str]| {
            let mut pip = Command::new(at.join("bin/pip"));
            pip.args(["install", "--quiet", "--disable-pip-version-check"]).args(arguments);
            pip
        };
        let wheel = wheel.display().to_string();
        run_command("install the wheel", &mut pip(&["--no-index", &wheel]))?;
        let has_optional = output_of("install", &mut pip(&OPTIONAL)).is_ok();
        if !has_optional {
            println!("python: skipped: tests with {}, which no index has", OPTIONAL.join(", "));
        }
        Ok(Self { python: at.join("bin/python"), has_optional })
    }

    fn python_version(&self) -> Result<String, String> {
        output_of("find Python", Command::new(&self.python).arg("--version"))
    }

    fn run_tests(&self, tests: &Path) -> Result<(), String> {
        self.run(tests, &["-m", "unittest", "--quiet", "test_package", "test_conformance"])?;
        match self.has_optional {
            true => self.run(
                tests,
                &["-m", "pytest", "--quiet", "-p", "no:cacheprovider", "pytest_fixtures.py"],
            ),
            false => Ok(()),
        }
    }

    fn run(&self, directory: &Path, arguments: &[&str]) -> Result<(), String> {
        let mut command = Command::new(&self.python);
        command.args(arguments).current_dir(directory).env("PYTHONDONTWRITEBYTECODE", "1");
        run_command(&arguments.join(" "), &mut command)
    }
}
