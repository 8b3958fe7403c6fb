//! Network cards: rings, interrupts, queues.

use std::collections::BTreeSet;

use super::{CheckSection, DoctorContext, MachineCheck};
use crate::{CpuList, Errno};

const CARDS: &str = "sys/class/net";
const RING_ENTRIES_RECOMMENDED: u32 = 1024;
/// NVMe/TCP (TCP transport 1.0 §3.1).
const STORAGE_PORT: u16 = 4420;

pub(super) fn check_network(patient: &DoctorContext<'_>) -> Vec<MachineCheck> {
    let machine = patient.machine;
    let is_card = |name: &String| machine.exists(&format!("{CARDS}/{name}/device"));
    let cards: Vec<String> = machine.directory_entries(CARDS).into_iter().filter(is_card).collect();
    if cards.is_empty() {
        let none = CheckSection::Network.new_check("network cards", "", "");
        return vec![none.with_info("none")];
    }
    let of_card = |card: &String| {
        [
            check_rings,
            check_coalescing,
            check_queues,
            check_xps,
            check_interrupt_affinity,
            check_hard_irq_deferral,
            check_traffic_classes,
            check_flower_filters,
        ]
        .map(|examine| examine(patient, card))
    };
    cards.iter().flat_map(of_card).collect()
}

fn check_rings(patient: &DoctorContext<'_>, card: &str) -> MachineCheck {
    let finding = CheckSection::Network.new_check(
        format!("{card} rings"),
        "1024, or as many as there can be",
        "packets of a burst are dropped when the ring is full",
    );
    match patient.kernel.nic_rings(card) {
        Err(errno) => finding.with_unknown(unreadable_text(card, "rings", errno)),
        Ok(found) => {
            let best = |max: u32| RING_ENTRIES_RECOMMENDED.min(max);
            let shown = format!("{} to receive, {} to send", found.receive, found.send);
            if found.receive >= best(found.receive_max) && found.send >= best(found.send_max) {
                return finding.with_good(shown);
            }
            let receive = found.receive.max(best(found.receive_max));
            let send = found.send.max(best(found.send_max));
            finding.with_warning(shown, format!("sudo ethtool -G {card} rx {receive} tx {send}"))
        }
    }
}

fn check_coalescing(patient: &DoctorContext<'_>, card: &str) -> MachineCheck {
    let finding = CheckSection::Network.new_check(
        format!("{card} interrupts"),
        "adaptive, or after some microseconds",
        "an interrupt for every packet costs more than the packet",
    );
    match patient.kernel.coalescing(card) {
        Err(errno) => finding.with_unknown(unreadable_text(card, "coalescing", errno)),
        Ok(found) if found.is_adaptive => finding.with_good("adaptive"),
        Ok(found) if found.receive_us > 0 => {
            finding.with_good(format!("after {} us", found.receive_us))
        }
        Ok(_) => finding.with_warning(
            "one for every packet",
            format!("sudo ethtool -C {card} adaptive-rx on, or rx-usecs 64 where it cannot"),
        ),
    }
}

fn check_queues(patient: &DoctorContext<'_>, card: &str) -> MachineCheck {
    let finding = CheckSection::Network.new_check(
        format!("{card} queues"),
        "one for each processor",
        "connections then share neither queue nor interrupt",
    );
    let online = patient.machine.online_cpus().map_or(0, |online| online.len());
    let wanted = u32::try_from(online).unwrap_or(u32::MAX).max(1);
    match patient.kernel.nic_channels(card) {
        Err(errno) => finding.with_unknown(unreadable_text(card, "channels", errno)),
        Ok(found) => {
            let best = wanted.min(found.combined_max);
            let shown = format!("{} of {}", found.combined, found.combined_max);
            if found.combined >= best {
                finding.with_good(shown)
            } else {
                finding.with_warning(shown, format!("sudo ethtool -L {card} combined {best}"))
            }
        }
    }
}

/// Transmit queue selection by CPU (XPS).
fn check_xps(patient: &DoctorContext<'_>, card: &str) -> MachineCheck {
    let finding = CheckSection::Network.new_check(
        format!("{card} XPS"),
        "each sending queue with processors of its own",
        "otherwise threads on all processors contend for the lock of a queue",
    );
    let directory = format!("{CARDS}/{card}/queues");
    let queues = tx_queues(patient, card);
    if queues.len() < 2 {
        return finding.with_info(format!("sending queues are {}", queues.len()));
    }
    let mask =
        |queue: &String| patient.machine.read_trimmed(&format!("{directory}/{queue}/xps_cpus"));
    let masks: Vec<Option<String>> = queues.iter().map(mask).collect();
    if masks.iter().all(Option::is_none) {
        return finding.with_unknown(format!("/{directory}/*/xps_cpusis not readable"));
    }
    let is_empty = |mask: &&Option<String>| {
        mask.as_ref().is_none_or(|mask| mask.bytes().all(|b| b"0,".contains(&b)))
    };
    let empty = masks.iter().filter(is_empty).count();
    if empty == 0 {
        return finding.with_good(format!("{} queues have processors", queues.len()));
    }
    finding.with_warning(
        format!("{empty} of {} queues have no processors", queues.len()),
        format!(
            "for i in $(seq 0 {}); do printf '%x\\n' $((1 << i)) | sudo tee \
             /{directory}/tx-$i/xps_cpus; done",
            queues.len() - 1
        ),
    )
}

/// Interrupt affinity of a card.
fn check_interrupt_affinity(patient: &DoctorContext<'_>, card: &str) -> MachineCheck {
    let finding = CheckSection::Network.new_check(
        format!("{card} interrupt affinity"),
        "processors without polling threads",
        "an interrupt on an isolated core preempts the polling thread there",
    );
    let machine = patient.machine;
    let mut cores: Vec<u32> = Vec::new();
    let numbers = machine.directory_entries(&format!("{CARDS}/{card}/device/msi_irqs"));
    let names = ["effective_affinity_list", "smp_affinity_list"];
    let mut read = 0;
    for number in &numbers {
        let mut lists =
            names.iter().map(|name| machine.read_cpu_list(&format!("proc/irq/{number}/{name}")));
        if let Some(list) = lists.find_map(|list| list) {
            cores.extend(list.iter());
            read += 1;
        }
    }
    if numbers.is_empty() {
        return finding.with_unknown("its driver names no interrupts of its own");
    }
    if read == 0 {
        return finding.with_unknown("/proc/irqis not readable");
    }
    let cores: CpuList = cores.into_iter().collect();
    let shown = format!("{read} on {cores}");
    let isolated = machine.isolated_cpus().map(|isolated| isolated.intersection(&cores));
    match isolated.filter(|both| !both.is_empty()) {
        None => finding.with_good(shown),
        Some(both) => finding.with_warning(
            format!("{shown}, of which {both} are isolated"),
            "isolcpus=managed_irq,… on the kernel's command line; or irqbalance off, and sudo tee \
             /proc/irq/N/smp_affinity_list",
        ),
    }
}

/// Deferral of hardware interrupts after an empty poll.
fn check_hard_irq_deferral(patient: &DoctorContext<'_>, card: &str) -> MachineCheck {
    let finding = CheckSection::Network.new_check(
        format!("{card} deferred interrupts"),
        "2 and 200000 ns where connections ask for busy-poll=, else 0 and 0",
        "sockets that are polled need no interrupts as long as the polling goes on",
    );
    let number = |name: &str| patient.machine.read_number(&format!("{CARDS}/{card}/{name}"));
    match (number("napi_defer_hard_irqs"), number("gro_flush_timeout")) {
        (Some(irqs), Some(flush)) => {
            finding.with_info(format!("napi_defer_hard_irqs {irqs}, gro_flush_timeout {flush} ns"))
        }
        _ => finding.with_unknown("this kernel has no napi_defer_hard_irqs"),
    }
}

/// Queue sets for traffic classes (mqprio).
fn check_traffic_classes(patient: &DoctorContext<'_>, card: &str) -> MachineCheck {
    let finding = CheckSection::Network.new_check(
        format!("{card} queue sets"),
        "a set of its own for storage, if it shares the card with other traffic",
        "mqprio gives it queues that others do not fill",
    );
    let queues = tx_queues(patient, card).len();
    match traffic_class_numbers(patient, card).len() {
        _ if queues == 1 => finding.with_info("one, as there is one queue"),
        0 => finding.with_unknown("its queues have no traffic class"),
        1 => {
            let (others, storage) = (queues - queues / 2, queues / 2);
            finding.with_info(format!(
                "1; half of the queues for storage: sudo tc qdisc add dev {card} root mqprio num_tc 2 \
                 map 0 1 queues {others}@0 {storage}@{others} hw 1 mode channel"
            ))
        }
        count => finding.with_info(format!("{count}; see: tc qdisc show dev {card}")),
    }
}

/// Traffic class numbers reported by the card's transmit queues.
fn traffic_class_numbers(patient: &DoctorContext<'_>, card: &str) -> BTreeSet<String> {
    let class = |queue: String| {
        let path = format!("{CARDS}/{card}/queues/{queue}/traffic_class");
        patient.machine.read_trimmed(&path)
    };
    tx_queues(patient, card).into_iter().filter_map(class).collect()
}

/// Filters that steer packets to such a queue set (flower).
fn check_flower_filters(patient: &DoctorContext<'_>, card: &str) -> MachineCheck {
    let finding = CheckSection::Network.new_check(
        format!("{card} flower rules"),
        "one that leads port 4420 to the set for storage, if there is one",
        "what comes in finds its set by them",
    );
    let index = patient.machine.read_number(&format!("{CARDS}/{card}/ifindex"));
    let Some(index) = index.and_then(|index| u32::try_from(index).ok()) else {
        return finding.with_unknown(format!("/{CARDS}/{card}/ifindexis not readable"));
    };
    let found = match patient.kernel.flower_filters(index) {
        Err(errno) => return finding.with_unknown(unreadable_text(card, "filters", errno)),
        Ok(found) => found,
    };
    let leads = found.iter().find(|flower| flower.tcp_port == Some(STORAGE_PORT));
    let sets = traffic_class_numbers(patient, card).len();
    match leads.map(|flower| flower.queue_set) {
        Some(Some(set)) => finding.with_good(format!("port {STORAGE_PORT} goes to set {set}")),
        Some(None) => finding.with_info(format!("one for port {STORAGE_PORT}, which names no set")),
        None if sets < 2 => {
            finding.with_info(format!("{}, none for port {STORAGE_PORT}", found.len()))
        }
        None => finding.with_warning(
            format!("{}, none for port {STORAGE_PORT}, and {sets} sets", found.len()),
            format!(
                "sudo tc qdisc add dev {card} clsact; sudo tc filter add dev {card} protocol ip \
                 ingress flower ip_proto tcp dst_port {STORAGE_PORT} skip_sw hw_tc 1"
            ),
        ),
    }
}

fn tx_queues(patient: &DoctorContext<'_>, card: &str) -> Vec<String> {
    let names = patient.machine.directory_entries(&format!("{CARDS}/{card}/queues"));
    names.into_iter().filter(|name| name.starts_with("tx-")).collect()
}

fn unreadable_text(card: &str, what: &str, errno: Errno) -> String {
    match errno {
        Errno::OPNOTSUPP => format!("the driver of {card}is not readable its {what}"),
        errno => format!("{card}is not readable its {what} ({errno})"),
    }
}
