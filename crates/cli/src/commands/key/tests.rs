//! Tests of `tenmil key`, without the program around it.
#![allow(clippy::disallowed_methods, reason = "a test writes files of its own")]

use clap::Parser;
use serde_json::Value;
use tenmil_base::{Error, ErrorCategory};

use super::{KeyArguments, check_no_key_in_arguments, execute_key};

const PSK: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
const SECRET: &str = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:";
const HOST: &str = "nqn.2014-08.org.example:client";
const SUBSYSTEM: &str = "nqn.2026-01.org.example:a";

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    key: KeyArguments,
}

struct Fixture {
    root: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        Self { root: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> String {
        self.root.path().join(name).display().to_string()
    }

    /// Runs `tenmil key …` on a keyring of the fixture.
    fn run(&self, words: &[&str]) -> Result<String, Error> {
        let keyring = self.path("keys");
        let line = ["key"].iter().chain(words).copied().chain(["--keyring", &keyring]);
        let line = Line::try_parse_from(line).unwrap();
        let mut out = Vec::new();
        execute_key(&line.key, &mut out)?;
        Ok(String::from_utf8(out).unwrap())
    }

    fn json(&self, words: &[&str]) -> Value {
        serde_json::from_str(&self.run(&[words, &["--json"]].concat()).unwrap()).unwrap()
    }

    fn error(&self, words: &[&str]) -> (String, String) {
        let error = self.run(words).unwrap_err();
        assert_eq!(error.category(), ErrorCategory::Usage, "{error}");
        (error.to_string(), error.hint().unwrap_or_default().to_owned())
    }

    /// Imports a key from a file.
    fn import(&self, name: &str, text: &str) -> String {
        let file = self.path("input");
        std::fs::write(&file, text).unwrap();
        self.run(&["import", name, &file, "--force"]).unwrap()
    }
}

/// Secret part of a key's text.
fn secret_of(text: &str) -> &str {
    text.trim().split(':').nth(2).unwrap()
}

#[test]
fn generated_key_is_exported_and_no_other_output_has_its_secret() {
    let fixture = Fixture::new();
    let said = fixture.run(&["generate", "psk", "db", "--hash", "sha384"]).unwrap();
    let path = fixture.path("keys/db");
    assert_eq!(
        said,
        format!(
            "key `db`: TLS PSK, 48 bytes, transformed with SHA-384, in {path}\nfor the other end: \
             `tenmil key export db` prints it\n"
        )
    );
    let exported = fixture.run(&["export", "db"]).unwrap();
    assert!(exported.starts_with("NVMeTLSkey-1:02:"), "{exported}");
    assert_eq!(std::fs::read_to_string(path).unwrap(), exported);
    assert_eq!(fixture.json(&["export", "db"])["key"], exported.trim());
    let secret = secret_of(&exported);
    let pair = ["--hostnqn", HOST, "--subsysnqn", SUBSYSTEM];
    for words in [&["list"][..], &["list", "--json"], &[&["list"], &pair[..]].concat()] {
        let said = fixture.run(words).unwrap();
        assert!(said.contains("psk") && !said.contains(secret), "{said}");
    }
    let listed = &fixture.json(&["list"])["keys"][0];
    assert_eq!((&listed["kind"], &listed["hash"]), (&"psk".into(), &"sha384".into()));
    assert_eq!((&listed["length_bytes"], &listed["age_s"]), (&48.into(), &0.into()));
    assert!(listed["modified"].as_str().unwrap().starts_with("20"), "{listed}");
    // The kind of a dhchap key, and its length without a hash.
    let made = fixture.json(&["generate", "dhchap", "c", "--hash", "none", "--length", "64"]);
    let fields = (&made["kind"], &made["hash"], &made["length_bytes"]);
    assert_eq!(fields, (&"dhchap".into(), &"none".into(), &64.into()));
}

#[test]
fn identities_of_a_pair_are_shown_with_their_derivations() {
    let fixture = Fixture::new();
    fixture.import("db", PSK);
    fixture.import("c", SECRET);
    let pair = ["--hostnqn", HOST, "--subsysnqn", SUBSYSTEM];
    let said = fixture.run(&[&["list"], &pair[..]].concat()).unwrap();
    let zero = format!("  NVMe0R01 {HOST} {SUBSYSTEM}  (specification, libnvme before 1.15)\n");
    assert!(said.contains(&zero), "{said}");
    assert_eq!(said.matches(&format!("  NVMe1R01 {HOST} {SUBSYSTEM} ")).count(), 2, "{said}");
    let json = fixture.json(&[&["list"], &pair[..]].concat());
    let names: Vec<_> = (0..2).map(|at| json["keys"][at]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["c", "db"]);
    assert_eq!(json["keys"][1]["identities"].as_array().unwrap().len(), 3);
    assert_eq!(json["keys"][0]["identities"], Value::Null);
}

#[test]
fn existing_key_is_replaced_only_with_force() {
    let fixture = Fixture::new();
    fixture.run(&["generate", "psk", "db"]).unwrap();
    let before = fixture.run(&["export", "db"]).unwrap();
    let (text, hint) = fixture.error(&["generate", "psk", "db"]);
    assert!(text.contains("keys/db: it exists already"), "{text}");
    assert!(hint.contains("--force"), "{hint}");
    assert_eq!(fixture.run(&["export", "db"]).unwrap(), before);
    fixture.run(&["generate", "psk", "db", "--force"]).unwrap();
    assert_ne!(fixture.run(&["export", "db"]).unwrap(), before);
}

#[test]
fn removed_key_is_gone_and_a_missing_one_is_named_with_the_others() {
    let fixture = Fixture::new();
    fixture.import("db", PSK);
    fixture.import("other", PSK);
    assert_eq!(fixture.run(&["remove", "db"]).unwrap(), "key `db` is removed\n");
    let (text, _) = fixture.error(&["remove", "db"]);
    assert!(text.contains("key `db`: keyring") && text.ends_with("expected other"), "{text}");
    assert_eq!(fixture.json(&["remove", "db", "--if-exists"])["changed"], false);
    assert_eq!(fixture.json(&["remove", "other"])["changed"], true);
    assert!(fixture.run(&["list"]).unwrap().ends_with(": no keys\n"));
}

#[test]
fn list_shows_unusable_files_beside_the_keys() {
    use std::os::unix::fs::PermissionsExt;
    let fixture = Fixture::new();
    fixture.import("a", PSK);
    fixture.import("b", PSK);
    let path = fixture.path("keys/a");
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    let said = fixture.run(&["list"]).unwrap();
    let expected = format!("unusable: a: keyring: read {path}: its mode is 0644");
    assert!(said.contains("b  ") && said.contains(&expected), "{said}");
    assert!(said.contains(&format!("fix: `chmod 600 {path}`")), "{said}");
    assert!(fixture.json(&["list"])["keys"][0]["unusable"].is_string());
}

#[test]
fn malformed_input_is_refused_without_showing_it() {
    let fixture = Fixture::new();
    let file = fixture.path("input");
    for (content, expected) in [
        (PSK.replace("VRLb", "VRLc"), "parse NVMeTLSkey-1 key: found CRC"),
        (secret_of(PSK).to_owned(), "found another text, expected NVMeTLSkey-1:"),
        (format!("{PSK}\n{PSK}\n"), "found 2 lines, expected one"),
    ] {
        std::fs::write(&file, &content).unwrap();
        let (text, hint) = fixture.error(&["import", "db", &file]);
        assert!(text.contains(expected) && text.contains(&file), "{text}");
        assert!(!format!("{text}{hint}").contains("9AQb2"), "{text}{hint}");
    }
    let (text, _) = fixture.error(&["import", "db", &fixture.path("none")]);
    assert!(text.contains("none: No such file"), "{text}");
    let (text, hint) = fixture.error(&["import", "../db", &file]);
    assert!(
        text.contains("name of a key: found '/' in it") && hint.contains("import NAME"),
        "{text}"
    );
}

#[test]
fn key_in_an_argument_is_refused_without_repeating_it() {
    let arguments = |words: &[&str]| words.iter().map(Into::into).collect::<Vec<_>>();
    let uri = format!("tcp://h/n/1?key={PSK}");
    for words in [
        &["tenmil", "key", "import", "db", SECRET][..],
        &["tenmil", "perf", &uri],
        &["tenmil", PSK],
    ] {
        let error = check_no_key_in_arguments(&arguments(words)).unwrap_err();
        let position = words.len() - 1;
        assert!(error.text.starts_with(&format!("argument {position} holds a key")), "{error}");
        assert!(!format!("{error:?}").contains("ia6z") && !format!("{error:?}").contains("VRLb"));
        assert!(error.hint().unwrap().contains("tenmil key import NAME < FILE"));
    }
    check_no_key_in_arguments(&arguments(&["tenmil", "key", "import", "DHHC-1"])).unwrap();
}

#[test]
fn options_that_no_key_can_have_are_refused() {
    let fixture = Fixture::new();
    for (words, expected) in [
        (&["generate", "psk", "a", "--hash", "sha512"][..], "found hash 03, expected 00 to 02"),
        (
            &["generate", "psk", "a", "--length", "48"],
            "found 48 bytes, expected 32 bytes for hash 01",
        ),
        (
            &["generate", "dhchap", "a", "--hash", "none", "--length", "16"],
            "found 16 bytes, expected 32",
        ),
    ] {
        let (text, _) = fixture.error(words);
        assert!(text.contains(expected), "{text}");
    }
    assert!(!std::path::Path::new(&fixture.path("keys")).exists(), "nothing was created");
    let pair = Line::try_parse_from(["key", "list", "--hostnqn", "nqn.2026-01.a"]);
    assert!(pair.is_err());
}

#[test]
fn kernel_without_the_keyring_is_named_with_the_module() {
    let fixture = Fixture::new();
    fixture.import("db", PSK);
    let words = ["insert", "db", "--hostnqn", HOST, "--subsysnqn", SUBSYSTEM];
    match fixture.run(&words) {
        Ok(said) => println!("skipped, this kernel has the keyring: {said}"),
        Err(error) => {
            assert!(error.text.contains("keyring .nvme"), "{error}");
            assert_eq!(error.category(), ErrorCategory::Environment);
        }
    }
}
