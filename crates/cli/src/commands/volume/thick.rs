//! `tenmil volume create --thick` and `tenmil volume inflate`: fully allocated volumes.

use clap::Args;
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_rpc::pool_commands::JobKind;

use super::{ByteSize, CommandOutput, run_job};

#[derive(Debug, Args)]
pub(super) struct InflateArguments {
    /// Volume; blocks shared with others or read from the parent are copied
    #[arg(value_name = "VOLUME")]
    volume: Uri,

    /// Limit of copied bytes per second, such as 100m
    #[arg(long, value_name = "BYTES")]
    limit_bytes: Option<ByteSize>,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// Makes a volume thick.
pub(super) fn inflate(opener: &Opener<'_>, it: &InflateArguments) -> CommandOutput {
    run_job(opener, &it.volume, it.limit_bytes, (JobKind::Inflate, "inflating"), it.json)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::tests::{pool, say};

    fn listed(device: &str, name: &str) -> Value {
        let all: Value = serde_json::from_str(&say(&["list", device, "--json"]).unwrap()).unwrap();
        let volumes = all["volumes"].as_array().unwrap();
        volumes.iter().find(|one| one["name"] == name).unwrap().clone()
    }

    #[test]
    fn a_thick_volume_says_so_and_whoever_says_it_twice_is_told() {
        let (_directory, device) = pool();
        let volume = |name: &str| format!("volume:[{device}]/{name}");
        let (log, db) = (volume("log"), volume("db"));
        let made = say(&["create", &log, "--size", "4m", "--thick"]).unwrap();
        assert_eq!(made, format!("thick volume `log` of 4 MiB: {log}\n"));
        let found = listed(&device, "log");
        assert_eq!((&found["thick"], &found["fully_allocated"]), (&true.into(), &true.into()));
        assert_eq!(
            (&found["reserved_bytes"], &found["used_bytes"]),
            (&(4 << 20).into(), &0.into())
        );
        let again = say(&["create", &log, "--size", "4m", "--thick"]).unwrap();
        assert_eq!(again, "volume `log` is there already\n");
        assert!(say(&["create", &log, "--size", "4m"]).is_err(), "it is not the same");
        let text = say(&["list", &device]).unwrap();
        assert!(text.contains("volume, thick\n"), "{text}");

        say(&["create", &db, "--size", "2m"]).unwrap();
        assert_eq!(listed(&device, "db")["fully_allocated"], Value::Null);
        let first = say(&["inflate", &db]).unwrap();
        assert_eq!(first, "volume `db` is thick, with space for all of its 2 MiB\n");
        let before = say(&["list", &device, "--json"]).unwrap();
        let second = say(&["inflate", &db, "--json"]).unwrap();
        let second: Value = serde_json::from_str(&second).unwrap();
        assert_eq!((&second["changed"], &second["volume"]["name"]), (&false.into(), &"db".into()));
        assert!(say(&["inflate", &db]).unwrap().contains("is thick already"));
        assert_eq!(say(&["list", &device, "--json"]).unwrap(), before);

        say(&["snapshot", &db, "monday"]).unwrap();
        assert_eq!(listed(&device, "db")["fully_allocated"], false);
        assert!(say(&["list", &device]).unwrap().contains("volume, thick: inflate it again\n"));
        say(&["inflate", &db]).unwrap();
        assert_eq!(listed(&device, "db")["fully_allocated"], true);
        say(&["resize", &db, "--size", "3m"]).unwrap();
        let found = listed(&device, "db");
        assert_eq!(
            (&found["fully_allocated"], &found["reserved_bytes"]),
            (&true.into(), &(3 << 20).into())
        );
    }

    #[test]
    fn what_cannot_be_thick_is_refused_with_the_remedy_and_changes_nothing() {
        let (_directory, device) = pool();
        let volume = |name: &str| format!("volume:[{device}]/{name}");
        let (db, sums, large) = (volume("db"), volume("sums"), volume("large"));
        say(&["create", &db, "--size", "1m"]).unwrap();
        say(&["snapshot", &db, "s"]).unwrap();
        say(&["create", &sums, "--size", "1m", "--checksums"]).unwrap();
        say(&["create", &large, "--size", "1g"]).unwrap();
        let before = say(&["list", &device, "--json"]).unwrap();
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
            let refused = say(&words).unwrap_err();
            assert!(refused.text.contains(text), "{words:?}: {refused}");
            let found = refused.hint.clone().unwrap_or_default();
            assert!(found.contains(hint), "{words:?}: {found}");
        }
        assert_eq!(say(&["list", &device, "--json"]).unwrap(), before);
    }
}
