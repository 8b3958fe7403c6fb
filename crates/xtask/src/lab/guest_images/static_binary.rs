//! Static build of tenmil: a guest has only the shared libraries of its tools.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::lab::check_totals::ScenarioError;

const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Optimized per crate only: guests are emulated, and link-time optimization would take long.
const PROFILE: &str = "release-no-lto";

/// Builds the program; returns its path.
pub(super) fn build_static_tenmil() -> Result<PathBuf, ScenarioError> {
    println!("lab: building a static tenmil");
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--quiet", "-p", "tenmil-cli", "--bin", "tenmil", "--features", "tls"])
        .args(["--target", TARGET, "--profile", PROFILE])
        .args(["--config", &format!("profile.{PROFILE}.debug=false")])
        .args(["--config", &format!("profile.{PROFILE}.strip=true")])
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .stdin(Stdio::null())
        .status()
        .map_err(|why| format!("start cargo: {why}"))?;
    if !status.success() {
        return Err(ScenarioError::Failed(format!("build a static tenmil: {status}")));
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or("target".into(), PathBuf::from);
    Ok(target.join(TARGET).join(PROFILE).join("tenmil"))
}
