//! `tenmil pool open` and `list`: properties and space usage of pools.

use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use tenmil_base::{Error, ErrorCategory};
use tenmil_block::Opener;
use tenmil_block::uri::{Uri, short_form_for_terminal};
use tenmil_drivers::pool::VolumeRef;
use tenmil_rpc::pool_commands::{format_bytes, format_devices, format_percents};

use super::super::pool_access::PoolAccess;
use super::align_columns;

#[derive(Debug, Args)]
pub(super) struct ListArguments {
    /// Devices of the pools
    #[arg(value_name = "URI", required = true, num_args = 1..)]
    devices: Vec<Uri>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Properties of a pool, and the process that has it open if it is another one.
pub(super) struct PoolSummary {
    store: Value,
    by: String,
}

impl PoolSummary {
    pub(super) fn from_device(opener: &Opener<'_>, device: &Uri) -> Result<Self, Error> {
        let mut access = PoolAccess::open_or_connect(opener, &VolumeRef::parse(device)?)?;
        let mut store = access.pool_json()?;
        store["process"] = access.owner_pid().into();
        Ok(Self { store, by: access.owner_line() })
    }

    pub(super) fn as_text(&self) -> String {
        let Self { store, by } = self;
        let text = |name: &str| tenmil_base::text::escape(store[name].as_str().unwrap_or_default());
        let [generation, volumes] = ["generation", "volumes"].map(|name| &store[name]);
        let devices = format_devices(&store["devices"]);
        let stopped = store["stopped_because"].as_str();
        let stopped = stopped.map_or(String::new(), |why| format!("\n  stopped: {why}"));
        format!(
            "pool `{}` on {}{stopped}\n{devices}  uuid {}, generation {generation}\n  \
             {volumes} volumes and snapshots\n  capacity {}: {} used, {} free, of which {} are \
             reserved for deletions and commits, {} of that for thick volumes\n  {} allocated, with \
             shared blocks counted for each volume; {} provisioned to writable volumes\n  capacity \
             alerts: {}\n{by}",
            text("name"),
            short_form_for_terminal(&text("uri")),
            text("uuid"),
            self.size_text("size_bytes"),
            self.size_text("used_bytes"),
            self.size_text("free_bytes"),
            self.size_text("reserved_bytes"),
            self.size_text("reserved_for_thick_bytes"),
            self.size_text("allocated_bytes"),
            self.size_text("provisioned_bytes"),
            format_percents(self.thresholds()),
        )
    }

    /// Exit code: 1 if the pool has stopped.
    pub(super) fn exit_code(&self) -> ExitCode {
        exit_code(self.is_stopped())
    }

    fn is_stopped(&self) -> bool {
        self.store["health"] == "stopped"
    }

    pub(super) const fn as_json(&self) -> &Value {
        &self.store
    }

    fn size_text(&self, name: &str) -> String {
        format_bytes(self.store[name].as_u64().unwrap_or_default())
    }

    fn thresholds(&self) -> [u8; 2] {
        let percent = |index: usize| self.store["thresholds_percent"][index].as_u64();
        [0, 1].map(|index| percent(index).and_then(|one| u8::try_from(one).ok()).unwrap_or(0))
    }
}

/// Prints one line per pool; exit code 1 if one of them has stopped.
pub(super) fn list_pools(
    opener: &Opener<'_>,
    list: &ListArguments,
) -> Result<(String, ExitCode), Error> {
    let of = |device: &Uri| PoolSummary::from_device(opener, device);
    let summaries: Vec<PoolSummary> = list.devices.iter().map(of).collect::<Result<_, _>>()?;
    let text = if list.json { list_json(&summaries) } else { list_text(&summaries) };
    Ok((text, exit_code(summaries.iter().any(PoolSummary::is_stopped))))
}

fn exit_code(is_stopped: bool) -> ExitCode {
    if is_stopped {
        ExitCode::from(ErrorCategory::Environment.exit_code())
    } else {
        ExitCode::SUCCESS
    }
}

fn list_text(summaries: &[PoolSummary]) -> String {
    let head =
        ["pool", "capacity", "used", "free", "allocated", "provisioned", "volumes", "device"]
            .map(String::from);
    let row = |one: &PoolSummary| {
        let text = |name: &str| one.store[name].as_str().unwrap_or_default().to_owned();
        let sizes =
            ["size_bytes", "used_bytes", "free_bytes", "allocated_bytes", "provisioned_bytes"];
        let [bytes, used, free, written, provisioned] = sizes.map(|name| one.size_text(name));
        let (name, volumes) = (text("name"), one.store["volumes"].to_string());
        let uri = match one.store["devices"].as_array().map_or(1, Vec::len) {
            0 | 1 => short_form_for_terminal(&text("uri")),
            count => format!("{} and {} more", short_form_for_terminal(&text("uri")), count - 1),
        };
        let on = match one.store["process"].as_u64() {
            Some(pid) => format!("{uri} (open in process {pid})"),
            None => uri,
        };
        let on = match one.store["stopped_because"].as_str() {
            Some(why) => format!("{on}, stopped: {why}"),
            None => on,
        };
        [name, bytes, used, free, written, provisioned, volumes, on]
    };
    align_columns(&[&[head][..], &summaries.iter().map(row).collect::<Vec<_>>()].concat())
}

fn list_json(summaries: &[PoolSummary]) -> String {
    let stores: Vec<&Value> = summaries.iter().map(PoolSummary::as_json).collect();
    format!("{:#}\n", json!({ "pools": stores }))
}

#[cfg(test)]
mod tests {
    use std::process::ExitCode;

    use serde_json::{Value, json};

    use super::{PoolSummary, list_text};

    fn test_summary(because: Option<&str>) -> PoolSummary {
        let health = if because.is_some() { "stopped" } else { "healthy" };
        let store = json!({ "name": "pool", "health": health, "stopped_because": because });
        PoolSummary { store, by: String::new() }
    }

    #[test]
    fn stopped_pool_is_listed_with_its_reason_and_exit_code_1() {
        let (fine, stopped) = (test_summary(None), test_summary(Some("its device has failed")));
        assert_eq!((fine.is_stopped(), stopped.is_stopped()), (false, true));
        assert_eq!((fine.exit_code(), stopped.exit_code()), (ExitCode::SUCCESS, ExitCode::from(1)));
        assert!(!fine.as_text().contains("stopped"));
        assert!(stopped.as_text().contains("\n  stopped: its device has failed\n"));
        let text = list_text(&[fine, stopped]);
        assert_eq!(text.matches("stopped: its device has failed").count(), 1, "{text}");
        assert_eq!(test_summary(None).as_json()["stopped_because"], Value::Null);
    }
}
