//! A store in a folder, and commands that are given there.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

pub(crate) const MIB: usize = 1 << 20;

/// A folder with a store in it.
pub(crate) struct PoolTestDirectory(tempfile::TempDir);

impl PoolTestDirectory {
    pub(crate) fn new(size: &str) -> Self {
        let pool = Self(tempfile::tempdir().unwrap());
        pool.stdout_of_success(&["pool", "create", &format!("{}?size={size}", pool.device_uri())]);
        pool
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn file_uri(&self, name: &str) -> String {
        format!("file:{}", self.path(name).display())
    }

    /// A file of the directory, as messages name it.
    pub(crate) fn file_path_text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// A volume of the pool, as messages name it.
    pub(crate) fn volume_name_in_messages(&self, name: &str) -> String {
        format!("{}/{name}", self.path("pool").display())
    }

    pub(crate) fn device_uri(&self) -> String {
        self.file_uri("pool")
    }

    pub(crate) fn volume_uri(&self, name: &str) -> String {
        format!("volume:[{}]/{name}", self.device_uri())
    }

    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        command.args(words).current_dir(self.0.path()).env("XDG_RUNTIME_DIR", self.0.path());
        command
    }

    pub(crate) fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    /// What a command says that succeeds. The files of a killed process are closed by the kernel in its own
    /// time, which on a busy machine was seen to be 25 s: a command that says so is repeated.
    pub(crate) fn stdout_of_success(&self, words: &[&str]) -> String {
        let begun = std::time::Instant::now();
        let mut output = self.run(words);
        let is_held = |output: &Output| {
            String::from_utf8_lossy(&output.stderr).contains("the kernel has not done its I/O yet")
        };
        while is_held(&output) && begun.elapsed().as_secs() < 120 {
            output = self.run(words);
        }
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {error}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// What a command says that does not, and its exit code.
    pub(crate) fn exit_code_and_stderr(&self, words: &[&str]) -> (Option<i32>, String) {
        let output = self.run(words);
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    }

    /// Writes a file of bytes that repeat nowhere near, with a hole in the middle.
    pub(crate) fn write(&self, name: &str, len: usize, salt: u64) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..len as u64 / 8)
            .flat_map(|word| (word ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
            .collect();
        bytes[len / 4..len / 2].fill(0);
        std::fs::write(self.path(name), &bytes).unwrap();
        bytes
    }

    /// What a volume holds.
    pub(crate) fn volume_bytes(&self, volume: &str) -> Vec<u8> {
        let target = self.path("back");
        let _ = std::fs::remove_file(&target);
        self.stdout_of_success(&["copy", &self.volume_uri(volume), &self.file_uri("back")]);
        std::fs::read(target).unwrap()
    }

    /// What is told about the volumes, by name.
    pub(crate) fn volume_row(&self, volume: &str) -> Value {
        let json = self.stdout_of_success(&["volume", "list", &self.device_uri(), "--json"]);
        let json: Value = serde_json::from_str(&json).unwrap();
        let found = json["volumes"].as_array().unwrap().iter();
        found.clone().find(|one| one["name"] == volume).unwrap().clone()
    }

    pub(crate) fn used(&self) -> u64 {
        let json = self.stdout_of_success(&["pool", "open", &self.device_uri(), "--json"]);
        serde_json::from_str::<Value>(&json).unwrap()["used_bytes"].as_u64().unwrap()
    }

    pub(crate) fn is_clean(&self) -> bool {
        let json = self.stdout_of_success(&["pool", "check", &self.device_uri(), "--json"]);
        serde_json::from_str::<Value>(&json).unwrap()["clean"] == true
    }
}
