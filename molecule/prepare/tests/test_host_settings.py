"""Settings of the system on a node that is a container: what is its own is set, and nothing claims the rest."""

from __future__ import annotations

from testinfra.host import Host


def test_the_journal_is_kept_on_disk_within_its_limits(host: Host) -> None:
    told = host.check_output("systemd-analyze cat-config systemd/journald.conf").splitlines()
    assert {"Storage=persistent", "SystemMaxUse=4096M", "SystemKeepFree=2048M"} <= set(told)
    # journald was started anew since: it writes there now.
    machine = host.file("/etc/machine-id").content_string.strip()
    assert f"/var/log/journal/{machine}/" in host.check_output("journalctl --header")


def test_apt_reads_the_list_of_what_an_operator_upgrades(host: Host) -> None:
    told = host.check_output("apt-config dump").splitlines()
    for package in ("linux-image-", "linux-headers-", "nvidia-", "libnvidia-", "podman"):
        assert f'Unattended-Upgrade::Package-Blacklist:: "{package}";' in told
    assert 'Unattended-Upgrade::Automatic-Reboot "false";' in told


def test_needrestart_leaves_replicas_and_balancer_running(host: Host) -> None:
    # As needrestart reads its files: Perl, and the last value true.
    script = (
        "our %nrconf; do '/etc/needrestart/conf.d/60-gpu-node.conf' or die; my $o = $nrconf{override_rc}; "
        "for my $s (@ARGV) { print $s, ' ', (join ',', map { $o->{$_} } grep { $s =~ /$_/ } keys %$o), qq(\\n) }"
    )
    units = "vllm-replica@0.service gpu-node-prober.service nginx.service cron.service"
    assert host.check_output(f"""perl -e "$(cat <<'END'\n{script}\nEND\n)" {units}""").splitlines() == [
        "vllm-replica@0.service 0",
        "gpu-node-prober.service 0",
        "nginx.service 0",
        "cron.service ",
    ]


def test_nothing_claims_to_set_the_hosts_kernel(host: Host) -> None:
    for path in (
        "/etc/sysctl.d/98-gpu-node.conf",
        "/etc/default/grub.d/60-gpu-node.cfg",
        "/etc/gpu-node/host-settings.json",
        "/etc/systemd/system/gpu-node-host-settings.service",
    ):
        assert not host.file(path).exists, path
