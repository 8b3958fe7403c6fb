//! `tenmil volume create --thick` and `tenmil volume inflate`: fully allocated volumes.

use clap::Args;
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_rpc::pool_commands::JobKind;

use super::{ByteSize, CommandOutput, run_job_and_render};

#[derive(Debug, Args)]
pub(super) struct InflateArguments {
    /// Volume; blocks shared with others or read from the parent are copied
    #[arg(value_name = "VOLUME")]
    pub(super) volume: Uri,

    /// Limit of copied bytes per second, such as 100m
    #[arg(long, value_name = "BYTES")]
    limit_bytes: Option<ByteSize>,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// Makes a volume thick.
pub(super) fn inflate_volume(opener: &Opener<'_>, it: &InflateArguments) -> CommandOutput {
    run_job_and_render(opener, &it.volume, it.limit_bytes, (JobKind::Inflate, "inflating"), it.json)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::tests::{run_volume_command, test_pool};

    fn listed_volume(device: &str, name: &str) -> Value {
        let all: Value =
            serde_json::from_str(&run_volume_command(&["list", device, "--json"]).unwrap())
                .unwrap();
        let volumes = all["volumes"].as_array().unwrap();
        volumes.iter().find(|one| one["name"] == name).unwrap().clone()
    }

    #[test]
    fn thick_volume_is_reported_and_a_repeated_inflate_changes_nothing() {
        let (_directory, device) = test_pool();
        let volume = |name: &str| format!("volume:[{device}]/{name}");
        let (log, db) = (volume("log"), volume("db"));
        let made = run_volume_command(&["create", &log, "--size", "4m", "--thick"]).unwrap();
        assert_eq!(made, format!("thick volume `log` of 4 MiB: {log}\n"));
        let found = listed_volume(&device, "log");
        assert_eq!((&found["thick"], &found["fully_allocated"]), (&true.into(), &true.into()));
        assert_eq!(
            (&found["reserved_bytes"], &found["used_bytes"]),
            (&(4 << 20).into(), &0.into())
        );
        let again = run_volume_command(&["create", &log, "--size", "4m", "--thick"]).unwrap();
        assert_eq!(again, "volume `log` is there already\n");
        assert!(
            run_volume_command(&["create", &log, "--size", "4m"]).is_err(),
            "it is not the same"
        );
        let text = run_volume_command(&["list", &device]).unwrap();
        assert!(text.contains("volume, thick\n"), "{text}");

        run_volume_command(&["create", &db, "--size", "2m"]).unwrap();
        assert_eq!(listed_volume(&device, "db")["fully_allocated"], Value::Null);
        let first = run_volume_command(&["inflate", &db]).unwrap();
        assert_eq!(first, "volume `db` is thick, with space for all of its 2 MiB\n");
        let before = run_volume_command(&["list", &device, "--json"]).unwrap();
        let second = run_volume_command(&["inflate", &db, "--json"]).unwrap();
        let second: Value = serde_json::from_str(&second).unwrap();
        assert_eq!((&second["changed"], &second["volume"]["name"]), (&false.into(), &"db".into()));
        assert!(run_volume_command(&["inflate", &db]).unwrap().contains("is thick already"));
        assert_eq!(run_volume_command(&["list", &device, "--json"]).unwrap(), before);

        run_volume_command(&["snapshot", &db, "monday"]).unwrap();
        assert_eq!(listed_volume(&device, "db")["fully_allocated"], false);
        assert!(
            run_volume_command(&["list", &device])
                .unwrap()
                .contains("volume, thick: inflate it again\n")
        );
        run_volume_command(&["inflate", &db]).unwrap();
        assert_eq!(listed_volume(&device, "db")["fully_allocated"], true);
        run_volume_command(&["resize", &db, "--size", "3m"]).unwrap();
        let found = listed_volume(&device, "db");
        assert_eq!(
            (&found["fully_allocated"], &found["reserved_bytes"]),
            (&true.into(), &(3 << 20).into())
        );
    }

    #[test]
    fn impossible_thick_volume_is_rejected_with_its_fix() {
        let (_directory, device) = test_pool();
        let volume = |name: &str| format!("volume:[{device}]/{name}");
        let (db, sums, large) = (volume("db"), volume("sums"), volume("large"));
        run_volume_command(&["create", &db, "--size", "1m"]).unwrap();
        run_volume_command(&["snapshot", &db, "s"]).unwrap();
        run_volume_command(&["create", &sums, "--size", "1m", "--checksums"]).unwrap();
        run_volume_command(&["create", &large, "--size", "1g"]).unwrap();
        let before = run_volume_command(&["list", &device, "--json"]).unwrap();
        let (new, snapshot) = (volume("new"), volume("s"));
        for (words, text, hint) in [
            (
                vec!["create", &new, "--size", "1m", "--thick", "--checksums"],
                "expected one of them",
                "Leave one of them out",
            ),
            (vec!["create", &new, "--size", "1g", "--thick"], "it needs 26", "pool grow"),
            (vec!["inflate", &large], "it needs 26", "pool grow"),
            (vec!["inflate", &sums], "it has checksums", "make it thick or give it checksums"),
            (vec!["inflate", &snapshot], "it is a snapshot", "make a clone"),
            (vec!["inflate", &new], "there is none", ""),
        ] {
            let refused = run_volume_command(&words).unwrap_err();
            assert!(refused.text.contains(text), "{words:?}: {refused}");
            let found = refused.hint.clone().unwrap_or_default();
            assert!(found.contains(hint), "{words:?}: {found}");
        }
        assert_eq!(run_volume_command(&["list", &device, "--json"]).unwrap(), before);
    }
}
